#!/usr/bin/env bash
# outlines-core: the index of "a|ab" does not allow the text "ab", nor does that of "0|0x1"
# allow "0x1": an alternative that begins with an earlier one is lost, without an error.
#
# Expected: a guide for structured text accepts what the expression matches as a whole, as
# Python's re.fullmatch does. Seen with outlines-core 0.2.14: the automaton has the preferences
# of a search ("the first alternative that matches wins, and the match ends there"), so after
# "a" only the end is allowed. The order of alternatives therefore matters ("ab|a" allows both),
# and so do lazy repetitions. An expression that ends with "$" allows all of its texts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet outlines-core==0.2.14
cat > "$work/show.py" <<'PY'
import re
from outlines_core import Index, Vocabulary

vocabulary = Vocabulary(256, {chr(i): [i] for i in range(128)})


def allowed(regex, text):
    index = Index(regex, vocabulary)
    state = index.get_initial_state()
    for char in text:
        state = index.get_next_state(state, ord(char))
        if state is None:
            return False
    return index.is_final_state(state)


for regex, text in [
    ("a|ab", "ab"), ("ab|a", "ab"), ("(a|ab)$", "ab"), ("0|0x1", "0x1"), ("a+?", "aa")
]:
    print(f"{regex} {text} {allowed(regex, text)} {bool(re.fullmatch(regex, text))}")
PY
found=$("$work/venv/bin/python" "$work/show.py")
echo "expression, text, allowed by the index, re.fullmatch:"
echo "$found"
expected="a|ab ab False True
ab|a ab True True
(a|ab)\$ ab True True
0|0x1 0x1 False True
a+? aa False True"
[[ $found == "$expected" ]]
