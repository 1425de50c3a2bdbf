"""The weight formats: how a weight is held in memory, chosen before there is one."""

from .linear import Float as Float
from .linear import Format as Format
from .linear_fp8 import Fp8 as Fp8
from .linear_int4 import Int4 as Int4
from .linear_int8 import Int8 as Int8
