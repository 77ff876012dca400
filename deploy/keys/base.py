"""What all groups of keys have in common."""

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Keys(BaseModel):
    """Some keys of a configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _take_no_switch_for_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse what YAML made of yes, no, on and off where a number or a word is wanted."""
        assert info.field_name is not None, "of a field"
        is_switch = cls.model_fields[info.field_name].annotation is bool
        if isinstance(value, bool) and not is_switch:
            raise ValueError(
                f"{str(value).lower()} is for keys that are on or off; if it is a word, quote it"
            )
        return value
