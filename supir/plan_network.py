"""What one call of the networks costs: the host's UNet, SUPIR's control encoder and adapters.

Each function mirrors one module of ``control_net.py``, ``adapters.py``, ``injection.py`` or of the
host's UNet, down to the local variables, because those decide when memory is given back. A change
there is a change here; tests hold both to the same counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from .errors import ShapeError
from .layout import HEAD_CHANNELS, AdapterDims, ControlDims, CrossDims, SftDims, SupirDims
from .plan_dims import Block, LayerDims, UNetDims
from .plan_tape import ASIDE, FLOAT_BYTES, Attention, Sym, Tape

AttentionShape = tuple[int, int, int, int, int]


@dataclass(frozen=True)
class StepNumbers:
    """One call of the networks on one batch.

    Attributes:
        launches: operators that do work on the device. launches_by_kind: the same by kind, and
            what is no launch: ``transfer`` (copies between host and device) and ``host``.
        flops: 2 per multiply-add of products, convolutions and attention.
        bytes_moved: bytes read and written by every launch.
        largest_tensor_bytes, live_peak_bytes: of tensors made in the call; weights and inputs
            excluded.
        attention_calls: calls by (batch, heads, n_query, n_key, dim_head).
        max_score_elements: most attention scores held at once, as the attention callable says.
        cast_launches: those of the launches that cast a weight to the activations' dtype.
        weight_tensors: weights and biases used, each a cast where it has another dtype.
        parameters: their elements.
    """

    launches: int
    launches_by_kind: Mapping[str, int]
    flops: int
    bytes_moved: int
    largest_tensor_bytes: int
    live_peak_bytes: int
    attention_calls: Mapping[AttentionShape, int]
    max_score_elements: int
    cast_launches: int
    weight_tensors: int
    parameters: int


def numbers_of(tape: Tape) -> StepNumbers:
    """Return what a tape holds."""
    return StepNumbers(
        launches=sum(n for kind, n in tape.kinds.items() if kind not in ASIDE),
        launches_by_kind=dict(tape.kinds),
        flops=tape.flops,
        bytes_moved=tape.bytes_moved,
        largest_tensor_bytes=tape.largest,
        live_peak_bytes=tape.peak,
        attention_calls=dict(tape.calls),
        max_score_elements=tape.scores,
        cast_launches=tape.casts,
        weight_tensors=tape.weights,
        parameters=tape.parameters,
    )


def replay(tape: Tape, step: StepNumbers, shape: Sequence[int], element_bytes: int) -> Sym:
    """Put a counted call on a tape as one entry and return its result."""
    for kind, launches in step.launches_by_kind.items():
        tape.count(kind, 0, 0, launches=launches)
    tape.count("matmul", step.bytes_moved, 0, step.flops, launches=0)
    tape.touch(step.live_peak_bytes)
    for call, count in step.attention_calls.items():
        tape.calls[call] += count * tape.factor
    tape.largest = max(tape.largest, step.largest_tensor_bytes)
    tape.scores = max(tape.scores, step.max_score_elements)
    tape.casts += step.cast_launches * tape.factor
    tape.weights = max(tape.weights, step.weight_tensors)
    tape.parameters = max(tape.parameters, step.parameters)
    return tape.make(shape, element_bytes)


@lru_cache(maxsize=256)
def plan_step(
    unet: UNetDims,
    supir: SupirDims | None,
    height: int,
    width: int,
    batch: int = 2,
    tokens: int = 77,
    dtype_bytes: int = 2,
    control_scale: float = 1.0,
    attention: Attention | None = None,
    hint_batch: int = 1,
    weight_bytes: tuple[int, int] = (0, 0),
) -> StepNumbers:
    """Count one call of the UNet with SUPIR in place. Remembers; do not change what it returns.

    Args:
        supir: None, or ``control_scale`` 0, is the host's own forward.
        height, width: of the latent (or tile), in cells, >= 1.
        batch: latents in the call, conditionings times pictures. tokens: text tokens of each.
        dtype_bytes: element size of activations.
        control_scale: at 1 the adapters save their blend with the unmodified activations.
        attention: cost of an attention call; None = one fused kernel.
        hint_batch: pictures behind the batch; the float32 hint is cast and repeated from these.
        weight_bytes: element size of the weights of UNet and SUPIR; 0 = ``dtype_bytes``. Others
            are cast on every use, which is counted.
    Raises: ShapeError for an empty latent or batch.
    """
    if min(height, width, batch, tokens, dtype_bytes, hint_batch) < 1:
        raise ShapeError(
            f"A latent of {height}x{width} cells in a batch of {batch} with {tokens} text tokens "
            "cannot be planned; each must be at least 1. Connect an image of at least 1x1 px."
        )
    tape = Tape(attention)
    x = Sym((batch, unet.in_channels, height, width), dtype_bytes)
    context = Sym((batch, tokens, unet.context_dim), dtype_bytes)
    y = Sym((batch, unet.adm_in_channels), dtype_bytes)
    hooks: _Hooks | None = None
    hint: Sym | None = None
    if supir is not None and control_scale != 0.0:
        hint = Sym((hint_batch, supir.control.hint_channels, height, width), FLOAT_BYTES)
        hint = tape.cast(hint, dtype_bytes, moves=True)
        hint = tape.run("elementwise", [hint], (batch, *hint.shape[1:]))
        with tape.weights_of(weight_bytes[1]):
            features = _control(tape, supir.control, x, hint, context, y)
        hooks = _Hooks(tape, supir.adapters, features, control_scale, weight_bytes[1])
        del features
    tape.weight_bytes = weight_bytes[0]
    out = _unet(tape, unet, hooks, x, context, y)
    del out, hint
    return numbers_of(tape)


# ------------------------------------------------------------------ networks


def _unet(tape: Tape, dims: UNetDims, hooks: _Hooks | None, x: Sym, context: Sym, y: Sym) -> Sym:
    """Mirror the host's forward (hooks None) or ``walk_unet``."""
    embedding, emb = _embed(tape, dims.model_channels, dims.time_embed_dim, x, y)
    blocks = _Blocks(tape, emb, context, dims.head_channels, dims.linear_projection)
    skips: list[Sym] = []
    h = x
    for block in dims.input_blocks:
        h = blocks.run(block, h)
        skips.append(h)
    h = middle = blocks.run(dims.middle, h)
    if hooks is None:
        del middle  # the walk keeps it, the host does not
    else:
        h = hooks.after_middle(h)
    for block in dims.output_blocks:
        skip = skips.pop()
        shape = skips[-1].shape if skips else None
        if hooks is None:
            h = tape.cat([h, skip], 1)
            del skip
            h = blocks.run(block, h, shape)
            continue
        h = hooks.merge(h, skip)
        layers = list(block)
        at = next((j for j, layer in enumerate(layers) if layer.kind == "up"), None)
        if at is not None:
            h = blocks.run(layers[:at], h, shape)
            h = hooks.before_upsample(h)
            layers = layers[at:]
        h = blocks.run(layers, h, shape)
    out = tape.group_norm(h)
    out = tape.point(out)
    del embedding
    return tape.conv(out, dims.out_channels)


def _control(tape: Tape, dims: ControlDims, x: Sym, hint: Sym, context: Sym, y: Sym) -> list[Sym]:
    """Mirror ``ControlNet.forward``."""
    embedding, emb = _embed(tape, dims.model_channels, dims.time_embed_dim, x, y)
    blocks = _Blocks(tape, emb, context, HEAD_CHANNELS, dims.linear_projection)
    features: list[Sym] = []
    h = tape.conv(x, dims.model_channels)
    h = tape.point(h, tape.conv(hint, dims.model_channels))
    features.append(h)
    for block in dims.blocks:
        layer = LayerDims(block.kind, block.in_channels, block.out_channels)
        h = blocks.run(_with_transformer(layer, block.depth), h)
        features.append(h)
    res = LayerDims("res", dims.middle_channels, dims.middle_channels)
    features.append(blocks.run((*_with_transformer(res, dims.middle_depth), res), h))
    del embedding
    return features


def _with_transformer(layer: LayerDims, depth: int) -> Block:
    width = layer.out_channels
    return (layer, LayerDims("transformer", width, width, depth)) if depth else (layer,)


def _embed(tape: Tape, channels: int, width: int, x: Sym, y: Sym) -> tuple[Sym, Sym]:
    """Time and size embedding: sinusoids in float32, two layers each, their sum."""
    batch, half = x.shape[0], channels // 2
    frequencies = tape.run("elementwise", [], (half,), FLOAT_BYTES)
    frequencies = tape.points(frequencies, 3)
    angles = tape.run("elementwise", [Sym((batch, 1), FLOAT_BYTES), frequencies], (batch, half))
    embedding = tape.cat([tape.point(angles), tape.point(angles)], 1)
    cast = tape.cast(embedding, x.element_bytes)
    emb = _mlp(tape, cast, width)
    return embedding, tape.point(emb, _mlp(tape, y, width))


def _mlp(tape: Tape, x: Sym, width: int) -> Sym:
    h = tape.linear(x, width)
    h = tape.point(h)
    return tape.linear(h, width)


class _Hooks:
    """Mirror of ``AdapterHooks``."""

    def __init__(
        self,
        tape: Tape,
        adapters: Sequence[AdapterDims],
        features: list[Sym],
        scale: float,
        weight_bytes: int,
    ) -> None:
        self._tape, self._scale, self._weight_bytes = tape, scale, weight_bytes
        self._adapters = iter(reversed(adapters))
        self._features = features
        self._feature = features[-1]

    def after_middle(self, h: Sym) -> Sym:
        dims = next(self._adapters)
        assert isinstance(dims, SftDims)
        with self._tape.weights_of(self._weight_bytes):
            return self._sft(dims, self._features.pop(), h, None)

    def merge(self, h: Sym, skip: Sym) -> Sym:
        dims = next(self._adapters)
        assert isinstance(dims, SftDims)
        self._feature = self._features.pop()
        with self._tape.weights_of(self._weight_bytes):
            return self._sft(dims, self._feature, skip, h)

    def _sft(self, dims: SftDims, control: Sym, skip: Sym, decoder: Sym | None) -> Sym:
        tape = self._tape
        joined = tape.point(skip, tape.conv(control, dims.skip_channels, kernel=1))
        if decoder is not None:
            joined = tape.cat([decoder, joined], 1)
        shared = tape.conv(control, dims.hidden_channels)
        shared = tape.point(shared)
        normed = tape.group_norm(joined)
        width = joined.shape[1]
        added = tape.point(normed, tape.conv(shared, width))
        out = tape.point(added, normed, tape.conv(shared, width))
        del added
        if self._scale == 1.0:
            return out
        raw = skip if decoder is None else tape.cat([decoder, skip], 1)
        return tape.point(raw, out)

    def before_upsample(self, x: Sym) -> Sym:
        dims = next(self._adapters)
        assert isinstance(dims, CrossDims)
        with self._tape.weights_of(self._weight_bytes):
            return self._cross(dims, self._feature, x)

    def _cross(self, dims: CrossDims, control: Sym, x: Sym) -> Sym:
        """Mirror ``ZeroCrossAttn.forward``; queries and keys are transposed views."""
        tape = self._tape
        queries = _tokens(tape.group_norm(x))
        context = _tokens(tape.group_norm(control))
        heads = dims.query_channels // HEAD_CHANNELS
        width = heads * HEAD_CHANNELS
        q, k, v = (
            tape.linear(source, width, bias=False, per_item=True)
            for source in (queries, context, context)
        )
        out = tape.attend(q, k, v, heads)
        del q, k, v
        out = tape.linear(out, dims.query_channels)
        return tape.point(x, out.view(*x.shape))


def _tokens(x: Sym) -> Sym:
    batch, channels, height, width = x.shape
    return x.view(batch, height * width, channels)  # BCHW -> BNC


# -------------------------------------------------------------------- blocks


@dataclass
class _Blocks:
    """The host's layers, with what all of them share in one call."""

    tape: Tape
    emb: Sym
    context: Sym
    head_channels: int
    linear_projection: bool

    def run(self, layers: Sequence[LayerDims], x: Sym, shape: tuple[int, ...] | None = None) -> Sym:
        """Mirror ``forward_timestep_embed``; ``shape`` is the size an upsampling must reach."""
        for layer in layers:
            if layer.kind == "res":
                x = self._res(x, layer.out_channels)
            elif layer.kind == "transformer":
                x = self._transformer(x, layer.depth)
            elif layer.kind == "up":
                x = self._up(x, layer.out_channels, shape)
            else:
                x = self.tape.conv(x, layer.out_channels, stride=2 if layer.kind == "down" else 1)
        return x

    def _up(self, x: Sym, width: int, shape: tuple[int, ...] | None) -> Sym:
        size = tuple(2 * side for side in x.shape[2:]) if shape is None else shape[2:]
        x = self.tape.run("elementwise", [x], (*x.shape[:2], *size))
        return self.tape.conv(x, width)

    def _norm_silu_conv(self, x: Sym, width: int) -> Sym:
        h = self.tape.group_norm(x)
        h = self.tape.point(h)
        return self.tape.conv(h, width)

    def _res(self, x: Sym, width: int) -> Sym:
        tape = self.tape
        h = self._norm_silu_conv(x, width)
        emb_out = tape.linear(tape.point(self.emb), width)
        h = tape.point(h, emb_out)
        h = self._norm_silu_conv(h, width)
        if x.shape[1] == width:
            return tape.point(x, h)
        return tape.point(tape.conv(x, width, kernel=1), h)

    def _transformer(self, x: Sym, depth: int) -> Sym:
        tape, x_in = self.tape, x
        batch, channels, height, width = x.shape
        tokens = height * width
        x = tape.group_norm(x)
        if not self.linear_projection:
            x = tape.conv(x, channels, kernel=1)
        # a single token has one memory layout only, so nothing is copied
        x = (tape.copy(x) if tokens > 1 else x).view(batch, tokens, channels)
        if self.linear_projection:
            x = tape.linear(x, channels)
        with tape.times(depth):
            x = self._block(x)
        if self.linear_projection:
            x = tape.linear(x, channels)
        x = (tape.copy(x) if tokens > 1 else x).view(batch, channels, height, width)
        if not self.linear_projection:
            x = tape.conv(x, channels, kernel=1)
        return tape.point(x, x_in)

    def _block(self, x: Sym) -> Sym:
        """Mirror ``BasicTransformerBlock.forward``."""
        tape = self.tape
        n = tape.layer_norm(x)
        n = self._attention(n, n)
        x = tape.point(n, x)
        n = tape.layer_norm(x)
        n = self._attention(n, self.context)
        x = tape.point(n, x)
        x_skip = x
        normed = tape.layer_norm(x)
        x = self._feed_forward(normed)
        del normed
        return tape.point(x_skip, x)

    def _attention(self, x: Sym, context: Sym) -> Sym:
        tape, width = self.tape, x.shape[-1]
        q = tape.linear(x, width, bias=False)
        k = tape.linear(context, width, bias=False)
        v = tape.linear(context, width, bias=False)
        out = tape.attend(q, k, v, width // self.head_channels)
        return tape.linear(out, width)

    def _feed_forward(self, x: Sym) -> Sym:
        tape, width = self.tape, x.shape[-1]
        inner = 4 * width
        projected = tape.linear(x, 2 * inner)
        shape = (*x.shape[:-1], inner)
        value, gate = projected.view(*shape), projected.view(*shape)
        h = tape.point(value, tape.point(gate))
        del projected, value, gate
        return tape.linear(h, width)
