"""Decodes a few tokens with llama.cpp and ends, for `bench start`.

Run as `python llama_start.py FILE PROMPT TOKENS` by a Python that has llama-cpp-python.
This module imports nothing of this project.
"""

import sys

import llama_cpp

file, prompt, count = sys.argv[1:]
model = llama_cpp.Llama(model_path=file, n_ctx=512, verbose=False)
done = model.create_completion(prompt, max_tokens=int(count), temperature=0.0)
print(done["choices"][0]["text"])
