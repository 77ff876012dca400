"""Compiles grammars of strangers, to say whether that can be done; see `forking`.

`grammars` starts `python -m cluster.router.sandbox.grammar_process MODEL_DIR VOCAB_SIZE EOS...`.
A schema of a few bytes can make llguidance end the process that it is in, or compile for minutes.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from cluster.router.sandbox.forking import Limits, serve
from worker.grammar import GrammarVocabulary

SECONDS = 1.0  # of computing
# Half of what a thread of a rank has: what passes here has room to spare there.
STACK = 4 * 2**20
FINE = b"+"  # before a verdict: there is no mistake


def main(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Say of each grammar on stdin what is wrong with it."""
    vocabulary = GrammarVocabulary(model_dir, vocab_size, eos_token_ids)

    def work(grammar: bytes) -> bytes:
        try:
            return vocabulary.mistake(grammar.decode()).encode() or FINE
        except MemoryError:
            return b"takes too much memory to compile"

    def lost(is_slow: bool) -> bytes:
        if is_slow:
            return f"takes more than {SECONDS:g} s to compile; say it with fewer parts".encode()
        return b"cannot be compiled: its parts are nested too deeply, or it is too large"

    serve(work, lost, Limits(SECONDS, is_computing=True, stack=STACK))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [int(one) for one in sys.argv[3:]])
