"""The weight formats that `bench kernels` measures, by the names of its --formats. A new one is an entry of FORMATS."""

import torch

from tilerank.kernels.formats import Float, Format, Int8

FORMATS: dict[str, Format] = {
    "bfloat16": Float(torch.bfloat16),
    "float32": Float(torch.float32),
    "int8": Int8(),
}
