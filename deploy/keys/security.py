"""Who may ask, and how that is known."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, model_validator

from cluster.router.tenancy.oidc.addresses import check_oidc
from deploy.config_values import parse_hosts, parse_origins
from deploy.keys.base import Keys


class SecurityKeys(Keys):
    """Keys that `--help` shows under Security."""

    api_key_file: Annotated[
        Path | None, Field(description="YAML file of API keys; without it only loopback is bound.")
    ] = None
    usage_file: Annotated[
        Path | None,
        Field(
            description="File of the pool with a line of JSON for each tenant and day: requests "
            "and tokens; default: nobody writes it down."
        ),
    ] = None
    anonymous: Annotated[
        bool,
        Field(
            description="Serve without keys beyond this machine, for networks where something "
            "else decides who may ask; nobody may load adapters or drain."
        ),
    ] = False
    tls_cert: Annotated[
        Path | None,
        Field(description="PEM file of the certificate, and those behind it; default: plain HTTP."),
    ] = None
    tls_key: Annotated[
        Path | None,
        Field(description="PEM file of its private key; default: that of the certificate."),
    ] = None
    oidc_issuer: Annotated[
        str | None,
        Field(
            description="URL of an OpenID Connect issuer whose tokens are taken as keys are; needs "
            "oidc_audience and oidc_rules."
        ),
    ] = None
    oidc_audience: Annotated[
        tuple[str, ...],
        Field(description="Audience, one of which a token must be for; repeatable."),
    ] = ()
    oidc_jwks: Annotated[
        str | None,
        Field(
            description="URL or file of the issuer's JSON Web Key Set; default: where its "
            "discovery document says."
        ),
    ] = None
    oidc_rules: Annotated[
        Path | None,
        Field(description="YAML file of rules: what the holder of a token may do, by its claims."),
    ] = None
    allowed_host: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_hosts),
        Field(
            description="Name under which clients may ask a server without keys; repeatable; "
            "always: addresses and localhost."
        ),
    ] = ()
    allowed_origin: Annotated[
        tuple[str, ...],
        BeforeValidator(parse_origins),
        Field(
            description="Site whose web pages may ask a server without keys, or *; repeatable: "
            "https://ui.example."
        ),
    ] = ()

    @model_validator(mode="after")
    def _check_callers(self) -> "SecurityKeys":
        for name in ("api_key_file", "oidc_issuer"):
            if self.anonymous and getattr(self, name) is not None:
                raise ValueError(f"anonymous and {name} exclude each other: give one of them")
        if self.tls_key is not None and self.tls_cert is None:
            raise ValueError("tls_key needs tls_cert")
        self._check_oidc()
        return self

    def _check_oidc(self) -> None:
        others = {
            "oidc_audience": bool(self.oidc_audience),
            "oidc_rules": self.oidc_rules is not None,
        }
        if self.oidc_issuer is None:
            given = [name for name, is_given in others.items() if is_given]
            given += ["oidc_jwks"] if self.oidc_jwks is not None else []
            if given:
                raise ValueError(f"{given[0]} needs oidc_issuer")
            return
        for name, is_given in others.items():
            if not is_given:
                raise ValueError(f"oidc_issuer needs {name}")
        check_oidc(self.oidc_issuer, self.oidc_jwks)

    @property
    def has_keys(self) -> bool:
        """Whether callers need a key, or a token."""
        return self.api_key_file is not None or self.oidc_issuer is not None
