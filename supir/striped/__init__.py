"""A KL VAE's encoder and decoder over row stripes: the untiled result in bounded memory.

``recognise`` says whether a network can be run this way, ``plan_encode`` and ``plan_decode``
say what a run will cost, ``encode`` and ``decode`` run it.
"""

from .layout import KLLayout, Step, describe
from .options import MIB, Attention, StripeOptions
from .plan import StripePlan, plan_decode, plan_encode, plan_steps
from .recognise import recognise
from .sweeps import Limits
from .walk import decode, encode, limits_of

__all__ = [
    "MIB",
    "Attention",
    "KLLayout",
    "Limits",
    "Step",
    "StripeOptions",
    "StripePlan",
    "decode",
    "describe",
    "encode",
    "limits_of",
    "plan_decode",
    "plan_encode",
    "plan_steps",
    "recognise",
]
