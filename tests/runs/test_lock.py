"""One owner per run folder: who is refused, and what a crash leaves."""

import json
import os
import signal
import socket
import time

import pytest

from poise.runs.lock import OWNER, BusyError, owned
from support.checkpoint_files import names

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes"),
    # Python 3.12 warns of a fork beside the threads of other tests; these children only lock and unlock files.
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]


def child(work):
    """A forked process that runs ``work`` and ends, with 0 where all went well."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        os._exit(1)


def test_a_second_one_is_refused_and_told_who_the_first_is(tmp_path):
    folder = tmp_path / "runs" / "x"
    with owned(folder, make=True):
        (folder / "config.json").touch()
        assert json.loads((folder / OWNER).read_text()).keys() == {"pid", "host", "since"}
        with pytest.raises(BusyError) as refused, owned(folder, make=False):
            pass
        for part in (f"process {os.getpid()} on {socket.gethostname()}", " since 20", "choose another run=DIR"):
            assert part in str(refused.value)
        (folder / OWNER).write_text("")
        with pytest.raises(BusyError, match="another process is training in it"), owned(folder, make=False):
            pass
    assert names(folder) == ["config.json"]
    with owned(folder, make=False):
        pass


def test_what_a_link_leads_to_is_not_emptied(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "x" / OWNER).symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match=r"owner.json is a link.*remove it first"), owned(tmp_path / "x", make=True):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_users_own_file_of_that_name_stays(tmp_path):
    (tmp_path / OWNER).write_text('{"name": "me"}')
    with (
        pytest.raises(OSError, match=r"owner.json is not a lock file of poise.*another run=DIR"),
        owned(tmp_path, make=True),
    ):
        pass
    assert (tmp_path / OWNER).read_text() == '{"name": "me"}'


def test_a_killed_owner_holds_nothing(tmp_path):
    heard, tells = os.pipe()

    def hold():
        with owned(tmp_path, make=False):
            (tmp_path / "config.json").touch()
            os.write(tells, b"held")
            signal.pause()

    pid = child(hold)
    os.close(tells)
    assert os.read(heard, 4) == b"held"
    os.close(heard)
    with pytest.raises(BusyError, match=f"process {pid} "), owned(tmp_path, make=False):
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert (tmp_path / OWNER).exists()
    with owned(tmp_path, make=False):
        assert json.loads((tmp_path / OWNER).read_text())["pid"] == os.getpid()
    assert names(tmp_path) == ["config.json"]


def test_never_two_at_once(tmp_path):
    (tmp_path / "config.json").touch()

    def contend():
        held = 0
        while held < 30:
            try:
                with owned(tmp_path, make=False):
                    (tmp_path / "inside").mkdir()  # fails where another is inside
                    (tmp_path / "inside").rmdir()
                    held += 1
            except BusyError:
                time.sleep(0)

    for pid in [child(contend) for _ in range(4)]:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert names(tmp_path) == ["config.json"]


def test_a_run_that_never_began_leaves_no_folder(tmp_path):
    with pytest.raises(KeyError), owned(tmp_path / "x", make=True):
        raise KeyError
    with owned(tmp_path / "absent", make=False):
        pass
    (tmp_path / "file").touch()
    with owned(tmp_path / "file", make=True):
        pass
    assert names(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_made_says_what_to_do(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OSError, match=r"run folder .*file/run cannot be created .*: choose another run=DIR"),
        owned(tmp_path / "file" / "run", make=True),
    ):
        pass
