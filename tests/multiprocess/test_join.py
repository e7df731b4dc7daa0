"""Joining by explicit arguments, without a launcher: an exception that names the culprit, in time.

JAX alone aborts (SIGABRT, SIGSEGV) or hangs in these cases, hence the check for returncode 1. The other faults
(doubled, out of range, two world sizes, nobody there ...) are in tests/mesh/test_process_roll_call.py.
"""

import socket

TIMEOUT_S = 6.0  # longer than processes that start together may start apart


def test_missing_ranks_are_named_on_every_process(start, free_port) -> None:
    address = f"127.0.0.1:{free_port}"
    for ended in start("join.py", [(address, 4, rank, TIMEOUT_S) for rank in (0, 2)]):
        assert ended.returncode == 1, ended.output
        assert "ranks [1, 3] of 4 did not come within" in ended.output


def test_a_port_in_use_is_an_error_and_no_crash(start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        first, second = start("join.py", [(address, 2, rank, TIMEOUT_S) for rank in range(2)])
    assert first.returncode == 1 and "the port is in use" in first.output, first.output
    assert second.returncode == 1 and "it is no jaxpar/1 store" in second.output, second.output


def test_two_meet_and_an_exception_ends_one_at_once_and_its_peer_hears_why(start, free_port) -> None:
    address = f"127.0.0.1:{free_port}"
    first, second = start("join.py", [(address, 2, rank, 20, "raise") for rank in range(2)])
    for rank, ended in enumerate((first, second)):
        assert f"joined as {rank} of 2: [0, 1]" in ended.output, ended.output
    assert second.returncode == 1 and "ValueError: no data here" in second.output, second.output
    assert first.returncode == 1, first.output
    assert "ranks [1] of 2 did not come within 2" in first.output
    assert "rank 1: failed with ValueError: no data here" in first.output
