"""`VERL` under Agent Lightning's path."""

from agl_core.algorithm.verl.algorithm import VERL as VERL
