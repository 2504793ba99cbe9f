"""llama.cpp for `bench peers`, run by a Python that has llama-cpp-python.

A line of JSON on the standard input is an order, a line on the output its answer. The
orders are the methods of `Session`. This module imports nothing of this project.
"""

import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

F32 = 0  # ggml's number of a dtype
OFF = 0  # llama.cpp's value for flash attention that is switched off
BATCH = 512  # tokens of a prompt that are read at a time


class Session:
    """A model and its context.

    Token ids are passed unchanged; logits of ids from `num_tokens` on are ignored.
    """

    def describe(self) -> dict[str, Any]:
        """Returns llama.cpp's version and the instruction sets of its build."""
        info = llama_cpp.llama_print_system_info().decode()
        return {"version": llama_cpp.__version__, "built_with": info.strip(" |")}

    def load(
        self, path: str, threads: int, context: int, num_tokens: int, exact: bool
    ) -> dict[str, Any]:
        """Loads a model; if `exact`, caches are float32 instead of float16."""
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {path}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = context, BATCH
        params.n_threads = params.n_threads_batch = threads
        if exact:
            params.type_k = params.type_v = F32
        self.params, self.own_choice = params, params.flash_attn_type
        self.context, self.num_tokens = None, num_tokens
        return self.attend(fused=True)

    def pid(self) -> dict[str, int]:
        """Returns the number of this process."""
        return {"pid": os.getpid()}

    def attend(self, fused: bool) -> dict[str, Any]:
        """Makes a new context with or without fused attention, and forgets all text.

        Fused attention rounds to about 1e-3 even with float32 caches.
        """
        self.params.flash_attn_type = self.own_choice if fused else OFF
        return self._renew()

    def _renew(self) -> dict[str, Any]:
        if self.context:
            llama_cpp.llama_free(self.context)
        self.length = 0
        self.context = llama_cpp.llama_init_from_model(self.model, self.params)
        if not self.context:
            raise RuntimeError("llama.cpp makes no context of this model")
        return {}

    def quantize(self, source: str, target: str, kind: str) -> dict[str, Any]:
        """Writes a GGUF file again with llama.cpp's quantizer.

        Args:
          kind: a type of file, such as "Q4_K_M"; or "MXFP4" or "NVFP4", which llama.cpp
            has for experts or not at all, and which are here the type of all matrices.
        """
        params = llama_cpp.llama_model_quantize_default_params()
        if kind in ("MXFP4", "NVFP4"):
            every = (llama_cpp.llama_model_tensor_override * 2)()  # the last is empty
            every[0].pattern = b"weight"
            every[0].type = getattr(llama_cpp, f"GGML_TYPE_{kind}")
            params.ftype, params.tt_overrides = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, every
        else:
            number = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}", None)
            if number is None:
                raise RuntimeError(f"llama.cpp has no type of file {kind}")
            params.ftype = number
        code = llama_cpp.llama_model_quantize(source.encode(), target.encode(), params)
        if code != 0:
            raise RuntimeError(f"llama_model_quantize: {code}")
        return {}

    def tokenize(self, text: str) -> dict[str, Any]:
        """Returns the ids of a text with special tokens, also those in the text."""
        vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        data, ids = text.encode(), (llama_cpp.llama_token * (len(text) * 4 + 8))()
        count = llama_cpp.llama_tokenize(
            vocabulary, data, len(data), ids, len(ids), True, True
        )
        return {"ids": list(ids[:count])}

    def logits(
        self, ids: Sequence[int], read: int, path: str, batch: int = 1
    ) -> dict[str, Any]:
        """Writes logits [T - read + 1, num_tokens] float32 to a file.

        The first `read` ids are processed together and give the first row. Those after
        them are processed `batch` at a time, and each gives another row.
        """
        self._read(ids[:read])
        rows = [self._last().copy()]
        for i in range(read, len(ids), batch):
            part = self._batch(ids[i : i + batch])
            self._run(part)
            rows += [self._logits(j).copy() for j in range(part.n_tokens)]
            llama_cpp.llama_batch_free(part)
        Path(path).write_bytes(np.stack(rows).tobytes())
        return {}

    def decode(self, ids: Sequence[int], count: int, draft: int = 0) -> dict[str, Any]:
        """Decodes `count` tokens greedily, after all ids.

        All ids but the last are processed before, outside the clock.

        Args:
          draft: tokens that llama-cpp-python's prompt lookup proposes at a time. If 0,
            it is not used.

        Returns:
          "seconds"; "tokens", the ids; "calls", the number of passes.
        """
        self._keep_snapshots(draft)
        self._read(ids[:-1])
        drafter = LlamaPromptLookupDecoding(num_pred_tokens=draft)
        text, calls, token = list(ids), 0, ids[-1]
        began = time.perf_counter()
        while (left := len(ids) + count - len(text)) > 0:
            if not draft:
                self._eval([token])
                token = int(self._last().argmax())
                text.append(token)
            else:
                text += self._verified(drafter(np.array(text, np.intc)), text[-1], left)
            calls += 1
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "tokens": text[len(ids) :], "calls": calls}

    def _verified(self, guess: Any, token: int, left: int) -> list[int]:
        """Runs a pass over the last token and the proposed ones, and returns the new
        tokens, at most `left`: the accepted ones and one more. The others are removed
        from the state."""
        draft = guess[: left - 1].tolist()
        batch, before = self._batch([token, *draft]), self.length
        self._run(batch)
        llama_cpp.llama_batch_free(batch)
        new = [int(self._logits(0).argmax())]
        while len(new) <= len(draft) and new[-1] == draft[len(new) - 1]:
            new.append(int(self._logits(len(new)).argmax()))
        self.length = before + len(new)
        if len(new) <= len(draft):
            memory = llama_cpp.llama_get_memory(self.context)
            if not llama_cpp.llama_memory_seq_rm(memory, 0, self.length, -1):
                raise RuntimeError("llama.cpp does not remove tokens from its state")
        return new

    def can_draft(self) -> dict[str, bool]:
        """Returns "supported": True if tokens can be removed from the model's state,
        which speculation needs."""
        self._keep_snapshots(1)
        kept = llama_cpp.llama_n_rs_seq(self.context)
        self._keep_snapshots(0)
        return {"supported": not self._recurrent() or kept > 0}

    def _recurrent(self) -> bool:
        recurrent = llama_cpp.llama_model_is_recurrent(self.model)
        return recurrent or llama_cpp.llama_model_is_hybrid(self.model)

    def _keep_snapshots(self, count: int) -> None:
        """Makes a new context if the model is recurrent and does not keep `count`
        states, so that as many tokens can be removed again."""
        if self._recurrent() and self.params.n_rs_seq != count:
            self.params.n_rs_seq = count
            self._renew()

    def time_prompt(self, ids: Sequence[int]) -> dict[str, Any]:
        """Returns the seconds in which a prompt is processed, with logits of the last
        token."""
        self._read(())
        began = time.perf_counter()
        for i in range(0, len(ids), BATCH):
            self._eval(ids[i : i + BATCH])
        llama_cpp.llama_synchronize(self.context)
        return {"seconds": time.perf_counter() - began}

    def time_pass(self, ids: Sequence[int], count: int) -> dict[str, Any]:
        """Returns the seconds of a pass over the first `count` ids, with logits of all.

        The pass follows a text of all ids, or further passes after it. The text is
        processed first, outside the clock, if it has not been, or the context is full.
        """
        batch = self._batch(ids[:count])
        left = llama_cpp.llama_n_ctx(self.context) - self.length
        if self.length < len(ids) or left < count:
            self._read(ids)
        began = time.perf_counter()
        self._run(batch)
        llama_cpp.llama_synchronize(self.context)
        seconds = time.perf_counter() - began
        llama_cpp.llama_batch_free(batch)
        return {"seconds": seconds}

    def _batch(self, ids: Sequence[int]) -> Any:
        """Returns a batch of these ids that continues the text, with all logits."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens, batch.pos = len(ids), None  # positions continue the text
        for i, token in enumerate(ids):
            batch.token[i], batch.logits[i] = token, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        return batch

    def _read(self, ids: Sequence[int]) -> None:
        """Starts a new text and processes its first ids."""
        self.length = 0
        memory = llama_cpp.llama_get_memory(self.context)
        llama_cpp.llama_memory_clear(memory, True)
        for i in range(0, len(ids), BATCH):
            self._eval(ids[i : i + BATCH])
        llama_cpp.llama_synchronize(self.context)

    def _eval(self, ids: Sequence[int]) -> None:
        array = (llama_cpp.llama_token * len(ids))(*ids)
        self._run(llama_cpp.llama_batch_get_one(array, len(ids)))

    def _run(self, batch: Any) -> None:
        code = llama_cpp.llama_decode(self.context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode: {code}")
        self.length += batch.n_tokens

    def _last(self) -> np.ndarray:
        """Returns logits [num_tokens] of the last id; the next pass overwrites them."""
        return self._logits(-1)

    def _logits(self, i: int) -> np.ndarray:
        """Returns logits [num_tokens] of id `i` of the last pass."""
        floats = llama_cpp.llama_get_logits_ith(self.context, i)
        pointer = ctypes.cast(floats, ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (self.num_tokens,))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp prints to stdout, which is reserved for our answers
    session = Session()
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(session, order.pop("order"))(**order)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
