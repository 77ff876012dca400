"""Adapters as bodies: a safetensors file by PUT, and SGLang's load_lora_adapter_from_tensors.

Owns what headers, queries and encodings mean. Bytes go on to the adapter pool as they come, and
nothing here looks into them further than it takes to tell a safetensors file from a pickle.
"""

import asyncio
import binascii
import json
import re
from collections.abc import AsyncIterator

from fastapi import APIRouter
from pydantic import Field, JsonValue, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cluster.adapters.records import LoadOptions
from cluster.api.auth import AdministrativeCall, Authenticator
from cluster.api.http import announced_size, query_flag
from cluster.api.openapi.operation import CHANGE, FLAG, Operation, Parameter, declared
from cluster.api.routes.admin.adapters import shown_record
from cluster.api.routes.sglang import LoraUpdate, respond_as_sglang
from cluster.api.schemas.adapters import AdapterEntry, AdapterName
from cluster.api.schemas.requests import Body
from cluster.errors import DeadlineExceeded, InvalidRequest
from cluster.router.bodies.validation import validation_error
from cluster.router.router import Router
from cluster.router.uploads import PIECE_BYTES, Upload
from cluster.tenancy.owners import Caller

CONFIG_HEADER = "x-adapter-config"
MAX_TENSORS_BODY = 32 << 20  # bytes of JSON; larger adapters are streamed
MAX_VALUES = 100_000  # lists, objects and what is in them: to make millions takes seconds
BODY_SECONDS = 60.0  # that one such body may take: others wait
SHARED_MEMORY = "/dev/shm/"
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_QUERY = frozenset({"load_inplace", "pinned", "sha256"})
_PICKLES = (b"\x80", b"PK")  # of a pickle, and of the archive that torch.save makes


class SglangTensorsBody(Body):
    """POST /load_lora_adapter_from_tensors."""

    lora_name: AdapterName
    config_dict: dict[str, JsonValue]
    serialized_tensors: str | None = None
    serialized_named_tensors: list[str] | None = Field(default=None, max_length=1024)
    load_format: str | None = None
    pinned: bool = False
    load_inplace: bool = False


UPLOAD = Operation(
    tag="adapters",
    summary="Loads an adapter from a body, a safetensors file.",
    right="adapters:load",
    takes_bytes=True,
    answer=AdapterEntry,
    errors=CHANGE,
    parameters=(
        Parameter("load_inplace", FLAG, "whether a name that is known gets a new version"),
        Parameter("pinned", FLAG, "whether it is kept in a slot of every rank"),
        Parameter("sha256", {"type": "string", "pattern": _SHA256.pattern}, "of the body, in hex"),
        Parameter(
            CONFIG_HEADER,
            {"type": "string"},
            "adapter_config.json in one line, where the file's own header has none",
            "header",
        ),
    ),
)
TENSORS = Operation(
    tag="adapters",
    summary="Loads an adapter from tensors, as SGLang spells it.",
    right="adapters:load",
    body=SglangTensorsBody,
    answer=LoraUpdate,
    errors=(*CHANGE, DeadlineExceeded),
    errors_as=LoraUpdate,
)


def upload_routes(router: Router, keys: Authenticator) -> APIRouter:
    """Return the routes."""
    routes = APIRouter()
    _add_put(routes, router, keys)
    _add_tensors(routes, router, keys)
    return routes


def _add_put(routes: APIRouter, router: Router, keys: Authenticator) -> None:
    @routes.put("/v1/adapters/{name:path}", openapi_extra=declared(UPLOAD))
    async def upload_adapter(http: HttpRequest, name: str) -> Response:
        with keys.administrative(http, "upload", "adapters:load") as call:
            call.load(name, bytes=announced_size(http))
            options = _options(http, call.principal.caller)
            call.entry.about(
                load_inplace=options.load_inplace, pinned=options.pinned, sha256=options.sha256
            )
            upload = Upload(num_bytes=announced_size(http), config=_config(http), options=options)
            record = await router.upload(name, http.stream(), upload)
        return await shown_record(router, record)


def _add_tensors(routes: APIRouter, router: Router, keys: Authenticator) -> None:
    turn = asyncio.Semaphore(1)  # one such body in memory at a time

    @routes.post("/load_lora_adapter_from_tensors", openapi_extra=declared(TENSORS))
    async def load_lora_adapter_from_tensors(http: HttpRequest) -> Response:
        async def load(call: AdministrativeCall) -> str:
            async with turn:
                body = await asyncio.to_thread(_parse_tensors, await _whole_body(http))
                name, root = body.lora_name, call.principal.adapter_root
                call.load(name, load_inplace=body.load_inplace, pinned=body.pinned)
                tensors = _the_tensors(body)
                config = json.dumps(body.config_dict).encode()
                caller = call.principal.caller
                options = LoadOptions(body.load_inplace, body.pinned, root=root, caller=caller)
                if tensors.startswith(SHARED_MEMORY):
                    call.entry.about(path=tensors)
                    await router.load_tensors(name, tensors, config, options)
                    return name
                data = await asyncio.to_thread(_decoded, tensors)
                upload = Upload(num_bytes=len(data), config=config, options=options)
                await router.upload(name, _parts(data), upload)
                return name

        return await respond_as_sglang(router, keys, http, "load_tensors", load)


def _config(http: HttpRequest) -> bytes | None:
    text = http.headers.get(CONFIG_HEADER)
    return None if text is None else text.encode("latin-1")  # as it came


def _options(http: HttpRequest, caller: Caller | None) -> LoadOptions:
    query = http.query_params
    for key in query:
        if key not in _QUERY:
            raise InvalidRequest(
                f"{key[:100]!r} is not known; an upload takes {', '.join(sorted(_QUERY))}",
                key[:100],
            )
    sha256 = query.get("sha256")
    if sha256 is not None and _SHA256.fullmatch(sha256) is None:
        raise InvalidRequest("sha256: must be 64 hex digits", "sha256")
    load_inplace, pinned = query_flag(http, "load_inplace"), query_flag(http, "pinned")
    return LoadOptions(load_inplace, pinned, sha256, caller=caller)


async def _whole_body(http: HttpRequest) -> bytes:
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in http.stream():
                data += part
                if len(data) > MAX_TENSORS_BODY:
                    raise InvalidRequest(
                        f"the body is over the limit of {MAX_TENSORS_BODY} bytes: upload the "
                        "adapter with PUT /v1/adapters/{name}, or name a file in /dev/shm"
                    )
    except TimeoutError as error:
        raise DeadlineExceeded(f"the body did not come in {BODY_SECONDS:g} s") from error
    return bytes(data)


def _parse_tensors(data: bytes) -> SglangTensorsBody:
    """Return the body; takes time, so call it in a thread."""
    # What is counted stands in no base64, and hardly in a configuration's texts.
    if sum(data.count(sign) for sign in (b",", b"[", b"{")) > MAX_VALUES:
        raise InvalidRequest(f"the body has more than {MAX_VALUES} values")
    try:
        body = SglangTensorsBody.model_validate_json(data)
    except ValidationError as error:
        raise validation_error(error) from None
    body.refuse_extras()
    return body


def _the_tensors(body: SglangTensorsBody) -> str:
    """Return the one text that stands for the tensors; a list has one for each rank, all equal."""
    if body.load_format not in (None, "auto", "safetensors"):
        raise InvalidRequest(
            f"load_format {body.load_format[:100]!r} is not supported: send a safetensors file",
            "load_format",
        )
    texts: list[str] = [*(body.serialized_named_tensors or ())]
    if body.serialized_tensors is not None:
        texts.append(body.serialized_tensors)
    if len(set(texts)) != 1:
        raise InvalidRequest(
            "serialized_tensors: one text is wanted; where there is one for each rank, the same",
            "serialized_tensors",
        )
    return texts[0]


def _decoded(text: str) -> bytes:
    """Return the bytes of a safetensors file.

    Raises:
        InvalidRequest: if they are something else; a pickle is not looked into.
    """
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InvalidRequest(
            "serialized_tensors is not base64 of a safetensors file, nor a path in /dev/shm",
            "serialized_tensors",
        ) from error
    if data.startswith(_PICKLES) and data[8:9] != b"{":
        raise InvalidRequest(
            "serialized_tensors is a pickle, which can run code when it is read; send "
            "base64 of safetensors.torch.save(tensors)",
            "serialized_tensors",
        )
    return data


async def _parts(data: bytes) -> AsyncIterator[bytes]:
    for begin in range(0, len(data), PIECE_BYTES):
        yield data[begin : begin + PIECE_BYTES]
