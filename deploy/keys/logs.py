"""What is told of what happens."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from deploy.config_values import ByteCount
from deploy.keys.base import Keys


class LogKeys(Keys):
    """Keys that `--help` shows under Logs, metrics, traces and recording."""

    log_level: Annotated[
        Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(description="Log level.")
    ] = "WARNING"
    request_log: Annotated[
        str | None,
        Field(
            description="File of each router's node with a line of JSON for each call, without "
            "prompts and answers; - is standard error; default: calls are not logged."
        ),
    ] = None
    request_log_content: Annotated[
        bool, Field(description="Write prompts and answers into the request log, too.")
    ] = False
    vllm_metrics: Annotated[
        bool,
        Field(
            description="Show vLLM's metrics in /metrics, too, for its dashboards and what scales "
            "or scores by them."
        ),
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None,
        Field(
            description="Where OpenTelemetry traces of calls are sent: http://HOST:4317; needs the "
            "extra otel."
        ),
    ] = None
    record: Annotated[
        Path | None,
        Field(description="File for the scheduler's events, to be replayed; it holds prompts."),
    ] = None
    record_max_bytes: Annotated[
        ByteCount, Field(description="Bytes of that file and its predecessor FILE.1 together.")
    ] = 2**30

    @model_validator(mode="after")
    def _check_request_log(self) -> "LogKeys":
        if self.request_log_content and self.request_log is None:
            raise ValueError("request_log_content needs request_log")
        return self
