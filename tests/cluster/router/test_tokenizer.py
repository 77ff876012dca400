import subprocess
import sys
from pathlib import Path

import pytest

from cluster.errors import InvalidRequest
from cluster.router.tokenizer import Tokenizer


def test_a_router_with_its_tokenizer_runs_without_torch_and_ray(model_dir: Path) -> None:
    code = f"""
import sys
from pathlib import Path
import cluster.api.app
from cluster.router.tokenizer import Tokenizer
tokenizer = Tokenizer.load(Path({str(model_dir)!r}))
tokenizer.render([{{"role": "user", "content": "a"}}], True, False, {{}})
assert tokenizer.decode(tokenizer.encode("abc", True), True) == "abc"
assert not {{"torch", "ray"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_bytes_of_all_byte_tokens_are_all_bytes(tokenizer: Tokenizer) -> None:
    singles = [tokenizer.token_bytes(token_id) for token_id in range(3, 3 + 256)]
    assert sorted(singles) == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


def test_a_final_message_can_be_left_open(tokenizer: Tokenizer) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It is"}]
    text = tokenizer.render(turns, False, True, {})
    assert text.endswith("<|im_start|>assistant\nIt is")


def test_a_model_without_a_template_refuses_conversations(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.render([{"role": "user", "content": "a"}], True, False, {})


def test_a_directory_without_a_fast_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
