"""`--keep`: commands run in a process that keeps the model loaded."""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from stree_jax.cli import attach
from stree_jax.cli.attach import ALONE, duration
from tests.support.pseudo_terminal import PseudoTerminal
from tests.support.table_models import byte_level, follow, padded_size, write_llama

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
HERE = Path(__file__).parents[2]
KEEP = ("--keep", "60s")


def write(path, letters):
    """Writes a model that continues the first letter with the others, and ends."""
    tokenizer = byte_level()
    chain = follow(tokenizer, [*letters, "</s>"], rest=2)
    write_llama(path, padded_size(tokenizer), tokenizer=tokenizer, chain=chain)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "llama"
    write(path, "abcd")
    return path


class Caller:
    """Runs `stree-jax` with sockets in a folder of its own."""

    def __init__(self, runtime, cache):
        self.runtime = runtime
        names = {"XDG_RUNTIME_DIR": str(runtime), "STREE_JAX_CACHE": str(cache)}
        self.env = os.environ | names | {"PYTHONPATH": str(HERE)}

    def start(self, *words, shell='exec "$@"', **options):
        """Starts a command, with `shell` around it."""
        command = sys.executable, "-m", "stree_jax", *map(str, words)
        return subprocess.Popen(
            ["sh", "-c", shell, "sh", *command],
            env=self.env,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *words, text=None, **options):
        stdin = subprocess.DEVNULL if text is None else subprocess.PIPE
        with self.start(*words, stdin=stdin, **options) as process:
            out, err = process.communicate(text, timeout=120)
        return process.returncode, out, err

    def residents(self):
        """Returns the ids of the processes that keep models for this caller."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            inside = any(word.startswith(str(self.runtime).encode()) for word in words)
            if b"stree_jax.cli.resident" in words and inside:
                found.append(int(folder.name))
        return found

    def gone(self):
        """True if no process of this caller is left within some seconds."""
        end = time.monotonic() + 20
        while self.residents() and time.monotonic() < end:
            time.sleep(0.1)
        return not self.residents()

    def end(self):
        for number in self.residents():
            os.kill(number, signal.SIGKILL)
        assert self.gone()


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    folder = tmp_path_factory.mktemp("r")
    folder.chmod(0o700)
    found = Caller(folder, tmp_path_factory.mktemp("cache"))
    yield found
    found.end()


def generate(prompt, model, *options):
    return "generate", prompt, "--model", model, "--drafter", "none", *options


def test_a_process_keeps_the_model(caller, model):
    alone = caller.run(*generate("a", model))
    assert alone[0] == 0 and alone[1].startswith("abcd\n") and not caller.residents()
    first = caller.run(*generate("a", model, *KEEP))
    (number,) = caller.residents()
    second = caller.run(*generate("a", model, *KEEP))
    assert first[0] == second[0] == 0 and caller.residents() == [number]
    assert first[1].splitlines()[0] == second[1].splitlines()[0] == "abcd"
    # A process that hangs is no reason to wait, and other commands do not ask it.
    os.kill(number, signal.SIGSTOP)
    try:
        for options in (KEEP, ("--keep", "off"), ()):
            assert caller.run(*generate("a", model, *options))[1].startswith("abcd")
    finally:
        os.kill(number, signal.SIGCONT)
    assert caller.run(*generate("a", model, "--keep", "0s"))[0] == 0
    assert caller.gone()


def test_it_has_the_folder_streams_and_messages_of_the_command(caller, model):
    inside = {"cwd": model.parent}
    code, out, _ = caller.run(
        *("generate", "--model", model.name, "--drafter", "none", *KEEP),
        text="a",
        **inside,
    )
    assert code == 0 and out.startswith("abcd\n")
    code, out, err = caller.run(*generate("a", "missing", *KEEP), **inside)
    assert (code, out) == (2, "") and err.startswith("stree-jax: missing: no such dir")
    assert len(caller.residents()) == 1


def test_a_changed_model_is_read_again(caller, tmp_path):
    path = tmp_path / "model"
    write(path, "abcd")
    assert caller.run(*generate("a", path, *KEEP))[1].startswith("abcd\n")
    sizes = {f.name: f.stat().st_size for f in path.iterdir()}
    write(tmp_path / "other", "aced")
    shutil.copytree(tmp_path / "other", path, dirs_exist_ok=True)
    assert {f.name: f.stat().st_size for f in path.iterdir()} == sizes
    assert caller.run(*generate("a", path, *KEEP))[1].startswith("aced\n")


def test_commands_at_once_and_a_command_that_is_killed(caller, model):
    options = "--max-new-tokens", "100000", "--ignore-eos"
    with caller.start(*generate("a", model, *KEEP, *options)) as long:
        assert long.stdout.read(4) == "abcd"
        code, out, _ = caller.run(*generate("a", model, *KEEP))  # alone, meanwhile
        assert code == 0 and out.startswith("abcd\n")
        assert long.poll() is None
        long.kill()
    # The long text ends as if by Ctrl-C, and the process is free again.
    end = time.monotonic() + 60
    while caller.run(*generate("a", model, "--keep", "0s"))[0] == 0:
        if not caller.residents():
            break
        assert time.monotonic() < end


def test_a_process_that_ends_is_reported_and_replaced(caller, model):
    options = "--max-new-tokens", "100000", "--ignore-eos"
    with caller.start(*generate("a", model, *KEEP, *options)) as long:
        assert long.stdout.read(4) == "abcd"
        (number,) = caller.residents()
        os.kill(number, signal.SIGKILL)
        _, err = long.communicate(timeout=30)
    assert long.returncode == 2 and "ended before the command did" in err
    assert caller.run(*generate("a", model, *KEEP))[1].startswith("abcd\n")
    (other,) = caller.residents()
    assert other != number


@pytest.mark.parametrize("seconds", [0.6, 1.2])
def test_ctrl_c_while_it_starts_leaves_it_whole(caller, model, seconds):
    caller.end()
    with caller.start(*generate("a", model, *KEEP)) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    for _ in range(2):
        code, out, err = caller.run(*generate("a", model, *KEEP))
        assert code == 0 and out.startswith("abcd\n") and "Traceback" not in err
    assert len(caller.residents()) == 1


def test_a_resident_of_a_background_job_hears_ctrl_c(caller, model):
    caller.end()
    ignoring = "trap '' INT; exec \"$@\""
    assert caller.run(*generate("a", model, *KEEP), shell=ignoring)[0] == 0
    (number,) = caller.residents()
    status = Path(f"/proc/{number}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if "SigIgn" in line)
    assert not int(mask, 16) >> (signal.SIGINT - 1) & 1


def test_descriptors_are_closed(caller, model):
    def descriptors():
        (number,) = caller.residents()
        return len(list(Path(f"/proc/{number}/fd").iterdir()))

    caller.run(*generate("a", model, *KEEP))
    before = descriptors()
    for _ in range(3):
        with caller.start(*generate("a", model, *KEEP)) as process:
            process.stdout.close()
            process.wait(60)
        caller.run(*generate("a", model, *KEEP))
    end = time.monotonic() + 30  # a connection may be closed after its command ends
    while descriptors() > before and time.monotonic() < end:
        time.sleep(0.1)
    assert descriptors() <= before  # three commands that leak would show three


def test_closed_input_is_closed_there(caller, model):
    closed = {"shell": 'exec "$@" <&-'}
    words = "generate", "--model", model, "--drafter", "none"
    alone = caller.run(*words, **closed)
    kept = caller.run(*words, *KEEP, **closed)
    assert alone[:1] == kept[:1] == (2,) and alone[2] == kept[2] != ""


def test_a_command_that_ends_at_once_is_not_run_again(monkeypatch):
    ours, theirs = socket.socketpair()
    send = socket.send_fds

    def sent_and_ended(*args):
        count = send(*args)
        theirs.close()
        return count

    monkeypatch.setattr(socket, "send_fds", sent_and_ended)
    with ours:
        attach._send(ours, ["info"], 60)  # an error would make the caller run it


def test_a_chat_whose_terminal_program_is_killed_ends(caller, model):
    folder = model.parent / "chat"
    if not folder.exists():
        shutil.copytree(model, folder)
        (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    words = "chat", "--model", folder, "--drafter", "none", *KEEP
    command = [sys.executable, "-m", "stree_jax", *map(str, words)]
    with PseudoTerminal(command, caller.env | {"TERM": "xterm"}) as terminal:
        before = termios.tcgetattr(terminal.own)
        terminal.wait_for("Ctrl-D ends the chat")
        (number,) = caller.residents()
        terminal.process.kill()
        end = time.monotonic() + 30
        while time.monotonic() < end:  # the process is free, and kept its model
            caller.run(*generate("a", model, "--keep", "0s"))
            if not caller.residents():
                break
        assert number not in caller.residents()
        assert termios.tcgetattr(terminal.own)[3] == before[3]  # echo, for one


def test_it_ends_when_it_has_nothing_to_do(caller, model, tmp_path):
    tmp_path.chmod(0o700)
    own = Caller(tmp_path, Path(caller.env["STREE_JAX_CACHE"]))
    assert own.run(*generate("a", model, "--keep", "1s"))[0] == 0
    assert own.gone()
    assert not list(tmp_path.glob("stree-jax/*"))


def test_a_folder_that_others_can_enter_is_not_used(caller, model, tmp_path):
    (tmp_path / "stree-jax").mkdir(mode=0o755)
    own = Caller(tmp_path, Path(caller.env["STREE_JAX_CACHE"]))
    code, out, err = own.run(*generate("a", model, *KEEP))
    assert code == 0 and out.startswith("abcd\n") and not own.residents()
    assert "the model is not kept" in err and "only its owner can enter" in err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1h", 3600), ("0s", 0), ("off", -1)],
)
def test_durations(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "-5m", "5 m", "1d", "169h", "0", "٣m"])
def test_wrong_durations(text):
    with pytest.raises(argparse.ArgumentTypeError, match="want seconds, minutes"):
        duration(text)


def test_a_wrong_duration_in_the_environment_is_reported(caller, model):
    caller.env["STREE_JAX_KEEP"] = "soon"
    try:
        code, _, err = caller.run(*generate("a", model))
    finally:
        del caller.env["STREE_JAX_KEEP"]
    assert code == 2 and err.startswith("stree-jax: STREE_JAX_KEEP: 'soon': want")


def test_commands_that_start_alone():
    args = {"keep": 60, "drafter": None, "mesh": None, "processes": None}
    assert attach.kept_for(argparse.Namespace(**args)) == 60
    for other in ({"drafter": "module:name"}, {"mesh": "2"}, {"processes": 2}):
        assert attach.kept_for(argparse.Namespace(**(args | other))) == ALONE
    assert attach.kept_for(argparse.Namespace()) == ALONE
