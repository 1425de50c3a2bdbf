"""The weight formats that `bench kernels` measures, by their names in --formats (`kernels.FORMAT_NAMES`)."""

import torch

from tilerank.kernels.weight_formats import (
    BlockInt8,
    ChannelFp8,
    Float,
    Format,
    Fp8,
    GroupInt8,
    Int4,
    Int4A8,
    Int8,
    Mxfp4,
    Mxfp4A8,
    TokenInt8,
)

WEIGHT_FORMATS: dict[str, Format] = {
    "bfloat16": Float(torch.bfloat16),
    "float32": Float(torch.float32),
    "int8": Int8(),
    "token-int8": TokenInt8(),
    "int4": Int4(128),
    "int4-g32": Int4(32),
    "int4-a8": Int4A8(128),
    "int4-a8-g32": Int4A8(32),
    "mxfp4": Mxfp4(),
    "mxfp4-a8": Mxfp4A8(),
    "fp8": Fp8(128, 128),
    "channel-fp8": ChannelFp8(),
    "fp8-g128": ChannelFp8(128),
    "block-int8": BlockInt8(128, 128),
    "group-int8": GroupInt8(128),
}
