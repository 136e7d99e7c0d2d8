"""What all settings have in common: frozen, no unknown names, nothing that JSON cannot hold."""

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A group of settings."""

    # A ledger in JSON cannot hold NaN or infinity.
    # Inputs stay out of errors: they may hold a password that the error is about.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )
