"""What all settings have in common: frozen, no unknown names, nothing that JSON cannot hold."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A group of settings."""

    # A ledger in JSON cannot hold NaN or infinity.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
