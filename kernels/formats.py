"""The weight formats: how a weight is held in memory, chosen before there is one."""

from .linear import Float as Float
from .linear import Format as Format
from .linear_int8 import Int8 as Int8
