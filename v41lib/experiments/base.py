"""What the parameters of every chapter have in common."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, model_validator

Profile = Literal["ci", "full", "gpu"]


class BaseParams(BaseModel):
    """The parameters of one chapter: the defaults are the ``ci`` profile's, ``PROFILES`` says what larger ones change.

    Types are strict, so that ``layers="3"`` is refused and not converted. Raises ``pydantic.ValidationError`` (a
    ``ValueError``) for an unknown name, a wrong type, and for the profile ``gpu`` where there is no CUDA device.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    PROFILES: ClassVar[dict[str, dict[str, Any]]] = {}

    profile: Profile = "ci"

    @classmethod
    def for_profile(cls, profile: Profile = "ci", **overrides: Any) -> Self:
        """The parameters of a profile, with some of them changed."""
        return cls.model_validate({"profile": profile, **cls.PROFILES.get(profile, {}), **overrides})

    @property
    def device(self) -> str:
        """Where to compute: ``cuda`` for the larger profiles when there is one, else ``cpu``."""
        return "cuda" if self.profile != "ci" and _cuda() else "cpu"

    @model_validator(mode="before")
    @classmethod
    def _lists_for_tuples(cls, values: Any) -> Any:
        # Command lines and notebooks' injected parameters know lists only; a frozen field is a tuple.
        if not isinstance(values, dict):
            return values
        tuples = {name for name, field in cls.model_fields.items() if get_origin(field.annotation) is tuple}
        return {
            name: tuple(value) if name in tuples and isinstance(value, list) else value
            for name, value in values.items()
        }

    @model_validator(mode="after")
    def _gpu_is_there(self) -> Self:
        if self.profile == "gpu" and not _cuda():
            raise ValueError("profile gpu needs a CUDA device, and torch sees none; profile full runs on any device")
        return self


def _cuda() -> bool:
    import torch  # slow to import, and a list of parameters should not need it

    return torch.cuda.is_available()
