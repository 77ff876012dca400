"""Which model is served, and how its ranks compute."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from deploy.keys.base import Keys
from worker.pools import KVCacheDtype
from worker.weights.gguf.files import is_gguf, stem
from worker.weights.partition import sums_are_exact

# What `--quantization` of vLLM and SGLang may say.
FORMATS_OF_CHECKPOINTS = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "bitsandbytes", "compressed-tensors"),
    *("w8a8_int8", "w8a8_fp8", "mxfp4", "nvfp4", "modelopt", "gguf", "marlin", "torchao"),
)


class ModelKeys(Keys):
    """Keys that `--help` shows under Model."""

    model: Annotated[str, Field(description="Directory, GGUF file or hub id of the base model.")]
    served_model_name: Annotated[
        str | None, Field(description="Name of the base model in the API; default: its last part.")
    ] = None
    tp: Annotated[int, Field(ge=1, description="Tensor-parallel size: ranks per scheduler.")] = 1
    dtype: Annotated[
        Literal["bfloat16", "float32"],
        Field(description="Type of weights and activations, and of KV unless kv_cache_dtype says."),
    ] = "bfloat16"
    quantization: Annotated[
        Literal["int8", "int4"] | None,
        Field(
            description="Quantize the linears of layers and the lm_head as they are loaded, and "
            "multiply them so, on CPUs: int8; int4, with the lm_head in int8; default: computed in "
            "dtype."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDtype,
        Field(
            description="Type of K and V in their pages: that of dtype, or, on CPUs, int8, with "
            "which nearly twice as many tokens have room."
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Field(description="Where the ranks compute.")
    ] = "auto"
    threads_per_rank: Annotated[
        int | None, Field(ge=1, description="CPU threads of a rank; default: cores / ranks.")
    ] = None
    revision: Annotated[
        str | None,
        Field(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$",
            description="Branch, tag or commit of a hub id; default: its main branch as it is at "
            "the start.",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Field(
            description="On GPUs too, bits do not depend on the batch; in int8 they do not "
            "on tp either; both at a cost in speed."
        ),
    ] = False
    max_model_len: Annotated[
        int | None, Field(ge=2, description="Longest prompt plus answer; default: the model's.")
    ] = None

    @field_validator("quantization", mode="before")
    @classmethod
    def _take_no_format_of_a_checkpoint(cls, value: object) -> object:
        """Refuse what others want to be told of a checkpoint that is quantized already."""
        if value in FORMATS_OF_CHECKPOINTS:
            raise ValueError(
                f"{value} is a way in which a checkpoint is quantized, which it says itself: leave "
                "it out, and the weights are widened as they are loaded; to compute in fewer bits "
                "give int8 or int4"
            )
        return value

    @property
    def has_exact_sums(self) -> bool:
        """Whether ranks add up integers."""
        return sums_are_exact(self.quantization, deterministic=self.deterministic)

    @property
    def base_name(self) -> str:
        """The base model's name in the API."""
        name = Path(self.model).name
        return self.served_model_name or (stem(name) if is_gguf(Path(name)) else name)
