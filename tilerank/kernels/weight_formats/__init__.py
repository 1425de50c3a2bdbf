"""The weight formats: how a weight is stored in memory."""

from ..weight import Format as Format
from ..weight import Layout as Layout
from ..weight import Weight as Weight
from .block_int8 import BlockInt8 as BlockInt8
from .byte_codes import BlockFormat as BlockFormat
from .channel_fp8 import ChannelFp8 as ChannelFp8
from .floats import FLOAT_LAYOUTS as FLOAT_LAYOUTS
from .floats import Float as Float
from .fp8 import Fp8 as Fp8
from .gguf import ANY_GGUF
from .gguf import GGUF_LAYOUTS as GGUF_LAYOUTS
from .gguf import Gguf as Gguf
from .gguf_a8 import ANY_GGUF_A8
from .gguf_a8 import GGUF_A8_LAYOUTS as GGUF_A8_LAYOUTS
from .gguf_a8 import GgufA8 as GgufA8
from .group_int8 import GroupInt8 as GroupInt8
from .int4 import Int4 as Int4
from .int4_a8 import Int4A8 as Int4A8
from .int8 import Int8 as Int8
from .mxfp4 import Mxfp4 as Mxfp4
from .mxfp4_a8 import Mxfp4A8 as Mxfp4A8
from .nvfp4 import Nvfp4 as Nvfp4
from .output_scaled import OutputScaledFormat as OutputScaledFormat
from .output_scaled import OutputScaledWeight as OutputScaledWeight
from .token_int8 import TokenInt8 as TokenInt8

LAYOUTS = (
    *FLOAT_LAYOUTS.values(),
    Int8.layout,
    TokenInt8.layout,
    Int4.layout,
    Int4A8.layout,
    Mxfp4.layout,
    Mxfp4A8.layout,
    Nvfp4.layout,
    Fp8.layout,
    BlockInt8.layout,
    ChannelFp8.layout,
    GroupInt8.layout,
    *GGUF_LAYOUTS.values(),
    *GGUF_A8_LAYOUTS.values(),
)
"""The layouts of weights for which kernels are compiled."""

EXPERT_LAYOUTS = {
    **{layout: layout for layout in LAYOUTS},
    **dict.fromkeys(GGUF_LAYOUTS.values(), ANY_GGUF),
    **dict.fromkeys(GGUF_A8_LAYOUTS.values(), ANY_GGUF_A8),
}
"""For each layout the one of the kernels that multiply experts. Projections of an expert may differ within one."""


def are_expert_formats(gate_up: Format, down: Format) -> bool:
    """Return whether the projections of an expert may have these formats."""
    return EXPERT_LAYOUTS[gate_up.layout] is EXPERT_LAYOUTS[down.layout]
