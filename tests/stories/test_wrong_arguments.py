"""Wrong values of every argument of every public function raise one line that names it.

No model runs: reading a prompt raises `Ran`, so a value that gets there was accepted.
`TAKEN` lists by hand which of the values each argument accepts.
"""

import inspect
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import stree_jax
from stree_jax import Sampling, sampling, trees
from stree_jax.common import checks
from stree_jax.generation import scoring, tokens
from stree_jax.speculation import accept
from stree_jax.speculation.start import Start
from tests.support.tiny import tiny


def public(name):
    """Returns a public function or class by its name."""
    places = stree_jax, trees, sampling, scoring, accept
    return next(getattr(place, name) for place in places if hasattr(place, name))


class Ran(Exception):
    """Raised in place of running a model: the arguments were accepted."""


WRONG = {
    "True": True,
    "1.5": 1.5,
    "64.0": 64.0,
    "nan": float("nan"),
    "inf": float("inf"),
    "-1": -1,
    "10**30": 10**30,
    "1e-40": 1e-40,
    "empty text": "",
    "'64'": "64",
    "'E '": "E ",
    "'e'": "e",
    "chain:1e3": "chain:1e3",
    "chain:": "chain:",
    "long text": "x" * 5000,
    "many digits": "chain:" + "9" * 5000,
    "null byte": "a\0b",
    "b'4'": b"4",
    "bytearray": bytearray(b"ab"),
    "dict": {"input_ids": [[1]]},
    "set": {"a", 1},
    "[None]": [None],
    "[True]": [True],
    "[b'a']": [b"a"],
    "[1.5]": [1.5],
    "[{}]": [{}],
    "ragged": [[1], [1, 2]],
    "[-1, 2**70]": [-1, 2**70],
    "object": object(),
    "np 1.5": np.array(1.5),
    "np.True_": np.True_,
    "np empty": np.zeros((0, 3)),
    "np text": np.array("a"),
    "np objects": np.array([None]),
    "jnp 3 axes": jnp.ones((2, 2, 2)),
    "jnp bool": jnp.array(True),
    "1j": 1j,
    "a class": Sampling,
    "a function": len,
    "long path": pathlib.Path("y" * 5000),
}
FLAGS = ("keep_past", "take_past", "sampled", "filters", "check")
FLAGS += ("dt_floor", "mtp", "whole")
NUMBERS = {"1.5", "64.0", "10**30", "np 1.5"}
NAMES = {"'64'", "'E '", "'e'", "chain:1e3", "chain:"}  # of files as well as others
TAKEN = {
    **dict.fromkeys(FLAGS, {"True", "np.True_", "jnp bool"}),
    **dict.fromkeys(("temperature", "repetition_penalty"), NUMBERS),
    **dict.fromkeys(
        ("presence_penalty", "frequency_penalty"),
        {"1.5", "64.0", "np 1.5", "-1", "1e-40"},
    ),
    **dict.fromkeys(("path_or_hub_id", "adapter", "path", "dst"), NAMES),
    "constraint": {"[None]"},  # no constraint of a single prompt
    "min_p": {"1e-40"},
    "prompts": {"ragged"},
    **dict.fromkeys(("logit_bias", "stop_strings", "stop_tokens"), {"np empty"}),
}


def calls():
    """Returns valid arguments of every public function."""
    model = tiny(1, layers=("mamba", "mlp"))
    ids = dict(prompts=[[8, 9]], max_new_tokens=4)
    arrays = dict(prompts=jnp.array([[1, 2]]), lengths=jnp.array([2]), max_new_tokens=3)
    plain = dict(model=model, drafter=None)
    tree = dict(prefix=[1, 2], tokens=[1, 2], parents=[-1, 0])
    drafted = dict(drafter=model, tree="A", sampling=Sampling())
    return {
        "generate": dict(model=model, **ids, **drafted),
        "stream": dict(model=model, **ids),
        "tune": dict(model=model),
        "load": dict(path_or_hub_id="/nonexistent/x"),
        "save": dict(model=model, dst="/nonexistent/x/y"),
        "load_drafter": dict(path_or_hub_id="/nonexistent/x"),
        "score": dict(model=model, tokens=[[1, 2]]),
        "score_tree": dict(model=model, **tree),
        "first_difference": dict(model=model, prompt=[1], tokens=[1, 2], others=[1, 3]),
        "plan": dict(model=model, memory="8GB"),
        "make_mesh": dict(text="data=1"),
        "shard": dict(model=model, mesh=stree_jax.make_mesh("data=1")),
        "Sampling": {},
        "sampling_rows": dict(settings=[Sampling()]),
        "resolve_rule": dict(rule="naive", tree="chain:2"),
        "Rule": dict(acceptance="naive", drafting="top_k"),
        "generate_tokens": plain | arrays,
        "chain": dict(n=2),
        "full_tree": dict(branching=2, depth=2),
        "layered": dict(width=2, depth=2),
        "pruned": dict(children=2, levels=3),
        "make_tree": dict(parents=[-1, 0]),
        "Beam": dict(width=2, depth=2),
        "Auto": dict(sizes=(1, 4)),
    }


@pytest.fixture
def nothing_runs(monkeypatch):
    def ran(*_, **__):
        raise Ran

    monkeypatch.setattr(Start, "begun", ran)
    monkeypatch.setattr(scoring, "_score", ran)
    monkeypatch.setattr(scoring, "_score_tree", ran)
    monkeypatch.setattr(tokens, "init_decoding", ran)


def names(function, argument, message):
    """True if a message begins with the argument, or with the function and it."""
    first = message.removeprefix("tree: ") if argument == "parents" else message
    own = ("rule", "tree") if function in ("Rule", "resolve_rule") else ()
    builders = {"full_tree", "layered", "pruned", "chain", "Beam", "Auto"}
    starts = [argument.removesuffix("s"), *own, "save"]
    if function in builders:
        starts.append(f"{function.lower()}: ")
    if argument == "text":
        starts.append("mesh")
    return any(first.startswith(start) for start in starts)


@pytest.mark.parametrize("function", calls())
def test_wrong_values_are_refused_in_one_line(
    function, nothing_runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    right, call = calls()[function], public(function)
    faults = []
    for argument in inspect.signature(call).parameters:
        if argument == "key":  # random keys have stories of their own
            continue
        for name, value in WRONG.items():
            if name in TAKEN.get(argument, ()):
                continue
            try:
                call(**right | {argument: value})
                taken = True
            except Ran:
                taken = True
            except (ValueError, TypeError) as error:
                message, taken = str(error), False
                wrong = "\n" in message or len(message) > 1000
                if wrong or not names(function, argument, message):
                    faults.append(f"{argument}={name}: {message[:150]}")
            except Exception as error:
                faults.append(
                    f"{argument}={name}: {type(error).__name__}: {error!s:.99}"
                )
                continue
            if taken and name not in TAKEN.get(argument, ()):
                faults.append(f"{argument}={name}: taken")
    assert not faults, "\n".join(faults)


HINTS = [  # keyword, value, and what the message suggests
    ("temperature", 0.8, "pass sampling=Sampling(temperature=0.8)"),
    ("topp", 0.9, "pass sampling=Sampling(top_p=0.9)"),
    ("seed", 3, "pass sampling=Sampling(seed=3)"),
    ("do_sample", True, "pass sampling=Sampling() to sample"),
    ("max_tokens", 64, "pass max_new_tokens=64"),
    ("max_length", 64, "pass max_new_tokens=64"),
    ("num_beams", 4, "beam search over whole outputs is not supported"),
    ("stop", "###", "pass stop_strings= with texts"),
    ("eos_token_id", 2, "pass stop_tokens=2"),
    ("draft_model", "x/y", "pass drafter=stree_jax.load(...)"),
    ("assistant_model", object(), "pass drafter=stree_jax.load(...)"),
    ("num_assistant_tokens", 5, "pass tree='chain:5'"),
    ("prompt_lookup_num_tokens", 5, "pass drafter='lookup'"),
    ("num_return_sequences", 2, "pass n=2"),
    ("past_key_values", [object()], "pass past=result.past"),
    ("attention_mask", np.ones((1, 4)), "leave it out"),
    ("max_memory", {0: "8GB"}, "pass memory=..."),
    ("max_new_token", 8, "did you mean 'max_new_tokens'?"),
    ("drafters", None, "did you mean 'drafter'?"),
    ("stoptokens", 2, "did you mean 'stop_tokens'?"),
    ("frobnicate", 1, "its arguments are model, prompts, max_new_tokens"),
]


@pytest.mark.parametrize(("name", "value", "hint"), HINTS, ids=[h[0] for h in HINTS])
@pytest.mark.parametrize("function", ["generate", "stream"])
def test_keywords_of_other_libraries_name_the_right_one(
    function, name, value, hint, nothing_runs
):
    model = calls()["stream"]["model"]
    with pytest.raises(TypeError) as caught:
        public(function)(model, "a", **{name: value})
    message = str(caught.value)
    assert message.startswith(f"{function}() has no argument '{name}': {hint}")
    assert "\n" not in message


@pytest.mark.parametrize("name", checks.HINTS)
def test_every_hint_is_about_an_unknown_keyword_of_a_public_function(name):
    """A hint that no function can give, or that no function needs, is a mistake."""
    options = {hint.option for hint in checks.HINTS[name]}
    lists = [
        set(inspect.signature(public(function)).parameters) for function in calls()
    ]
    assert any(name not in known and options & known for known in lists)


def test_signatures_stay_visible():
    """Of a decorated function, for editors, `help` and type checkers."""
    for function in calls():
        parameters = inspect.signature(public(function)).parameters
        kinds = {p.kind for p in parameters.values()}
        assert not kinds & {inspect.Parameter.VAR_KEYWORD}, function
    assert "max_new_tokens" in inspect.signature(stree_jax.generate).parameters
    assert stree_jax.generate.__doc__.startswith("Generates text")


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        ("load", "torch_dtype", "pass dtype="),
        ("load", "trust_remote_code", "leave it out"),
        ("load", "device_map", "pass mesh="),
        ("load", "dtyp", "did you mean 'dtype'?"),
        ("tune", "temperature", "pass sampled=True"),
        ("tune", "batch_size", "pass batch=1"),
        ("plan", "draft_model", "pass drafter="),
        ("score", "input_ids", "pass tokens=1"),
        ("score", "token", "did you mean 'tokens'?"),
        ("generate_tokens", "temperature", "pass sampling=Sampling(temperature="),
        ("generate", "prompt", "pass prompts="),
        ("generate", "input_ids", "pass prompts="),
        ("generate", "options", "did you mean "),
        ("stream", "step", "did you mean 'steps'?"),
        ("save", "destination", "its arguments are model, dst"),
        ("sampling_rows", "seed", "pass key=jax.random.key(1)"),
        ("Sampling", "topk", "pass top_k=1"),
        ("Sampling", "temprature", "did you mean 'temperature'?"),
        ("Sampling", "max_tokens", "pass max_new_tokens=1 to generate()"),
        ("Sampling", "frobnicate", "its arguments are temperature, top_k"),
        ("Rule", "draft", "did you mean 'drafting'?"),
        ("chain", "length", "its arguments are n"),
        ("make_tree", "parent", "did you mean 'parents'?"),
    ],
)
def test_unknown_keywords_of_other_functions(function, name, hint):
    with pytest.raises(TypeError) as caught:
        public(function)(**{name: 1})
    begin = f"{function}() has no argument '{name}': {hint}"
    assert str(caught.value).startswith(begin)


@pytest.mark.parametrize(
    ("value", "stored"),
    [(np.float32(0.5), 0.5), (np.array(0.5), 0.5), (jnp.array(2), 2.0), (1, 1.0)],
)
def test_numbers_of_arrays_are_numbers(value, stored):
    assert Sampling(temperature=value) == Sampling(temperature=stored)


def test_a_number_too_small_for_float32_is_refused():
    with pytest.raises(ValueError, match=r"^temperature: want 0 \(greedy\) or .*1e-40"):
        Sampling(temperature=1e-40)


@pytest.mark.parametrize(
    ("memory", "wrong"), [("9" * 400, "most"), (b"8GB", "want bytes"), (0.5, "least")]
)
def test_wrong_amounts_of_memory(memory, wrong):
    with pytest.raises(ValueError, match=f"^memory: .*{wrong}"):
        stree_jax.plan(tiny(1, layers=("mamba",)), memory)


def test_paths_that_no_file_system_takes(tmp_path):
    model = tiny(1, layers=("mamba",))
    for path in ("x" * 5000, "a\0b", pathlib.Path("x" * 300)):
        for call in (stree_jax.load, stree_jax.load_drafter):
            with pytest.raises(stree_jax.CheckpointError, match="^path"):
                call(path)
        with pytest.raises(stree_jax.CheckpointError, match="^save: dst"):
            stree_jax.save(model, path)
    assert not any(tmp_path.iterdir())


def test_results_and_paths_in_wrong_places():
    model = tiny(1, layers=("mamba",))
    with pytest.raises(
        ValueError, match=r"^drafter: got a path; give stree_jax.load_d"
    ):
        stree_jax.generate(model, [[8]], drafter=pathlib.Path("demo-drafter"))
    with pytest.raises(ValueError, match=r"^prompts\[0\].* pass a list of it"):
        stree_jax.generate(model, np.array([8, 9]))
    for stops in ("</s>", ["</s>"]):
        with pytest.raises(ValueError, match="^stop_tokens: .* stop_strings= for text"):
            stree_jax.generate(model, [[8]], stop_tokens=stops)
    result = stree_jax.generate(model, [[8]], max_new_tokens=1)
    with pytest.raises(ValueError, match="^past: .*; pass its .past"):
        stree_jax.generate(model, [[8]], past=result)
    with pytest.raises(ValueError, match=r"^tree: unknown name 'e'; did you mean 'E'"):
        stree_jax.generate(model, [[8]], drafter="lookup", tree="e")


def test_names_of_drafters_are_the_same_everywhere(nothing_runs):
    """ "auto", the default of `generate`, is accepted wherever a drafter is named. For
    "none", the command's name for plain decoding, the message suggests None."""
    for function in ("generate", "stream", "tune", "generate_tokens"):
        call, right = public(function), calls()[function]
        right.pop("sampling", None)
        for name in ("none", "None"):
            with pytest.raises(ValueError, match="^drafter: .*give None for plain"):
                call(**right | {"drafter": name})
        with pytest.raises(Ran):
            list(call(**right | {"drafter": "auto"}))
    model = calls()["plan"]["model"]
    plans = [stree_jax.plan(model, "8GB", drafter=d) for d in ("auto", "lookup")]
    assert plans[0].best == plans[1].best
    with pytest.raises(ValueError, match="^drafter: .*give None for plain"):
        stree_jax.plan(model, "8GB", drafter="none")
    with pytest.raises(ValueError, match="^drafter: .*or None for plain decoding"):
        stree_jax.generate(model, [[8]], drafter="demo-drafter")


@pytest.mark.parametrize(
    "name", ["n", "capacity", "steps", "samples", "ahead", "width"]
)
def test_numbers_out_of_range_name_the_range(name):
    model, big = tiny(1, layers=("mamba",)), 2**40
    with pytest.raises(ValueError, match=rf"^{name}: want [01]\.\.\d+ .*, got {big}"):
        match name:
            case "steps":
                stree_jax.stream(model, [[8]], steps=big)
            case "samples":
                stree_jax.sampling.settings.sampling_rows([Sampling()], samples=big)
            case "ahead" | "width":
                drafter = stree_jax.drafters.Staged(model, None, **{name: big})
                stree_jax.generate(model, [[8]], drafter=drafter, tree="A")
            case _:
                stree_jax.generate(model, [[8]], **{name: big})
