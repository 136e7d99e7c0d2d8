"""Rewards, under a path that Agent Lightning deprecates: import them from `agl_core`."""

import warnings

from agl_core.emitter.reward import RewardDimension as RewardDimension
from agl_core.emitter.reward import emit_reward as emit_reward
from agl_core.emitter.reward import find_final_reward as find_final_reward
from agl_core.emitter.reward import find_reward_spans as find_reward_spans
from agl_core.emitter.reward import get_reward_value as get_reward_value
from agl_core.emitter.reward import get_rewards_from_span as get_rewards_from_span
from agl_core.emitter.reward import is_reward_span as is_reward_span
from agl_core.emitter.reward import reward as reward

warnings.warn(
    "agl_core.reward is deprecated; import the names from agl_core",
    DeprecationWarning,
    stacklevel=2,
)
