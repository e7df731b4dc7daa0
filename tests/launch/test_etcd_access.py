"""etcd with TLS, certificates on both sides, users and passwords: a real etcd, certificates made here (openssl)."""

import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxpar_launch import EtcdAccess, LaunchSpecError, RendezvousConf, RendezvousSpec
from jaxpar_launch._etcd import EtcdClient
from jaxpar_launch._etcd_http import Gateway
from jaxpar_launch._rdzv_spec import rendezvous_of
from jaxpar_launch.cli import main
from jaxpar_launch.store import StoreAuthenticationError

PASSWORD = "of train, with = and ,"
FAST = "last_call_timeout=0.5,keep_alive_interval=0.3,join_timeout=20"
CURVE = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ours.pem and theirs.pem, who sign; and, signed by ours: server, elsewhere (for another name), host."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, to make certificates")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=20)

    for name in ("ours", "theirs"):
        openssl(
            "req", "-x509", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"
        )
    for name, place in (("server", "IP:127.0.0.1"), ("elsewhere", "DNS:etcd.example"), ("host", "DNS:host")):
        extension = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={place}"]
        openssl("req", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.csr", *extension)
        signer = ["-CA", "ours.pem", "-CAkey", "ours.key", "-CAcreateserial"]
        openssl(
            "x509", "-req", "-in", f"{name}.csr", *signer, "-copy_extensions", "copy", "-out", f"{name}.pem"
        )
    openssl("ec", "-in", "host.key", "-aes128", "-passout", "pass:x", "-out", "locked.key")
    return folder


def shown(files: Path, name: str) -> list[object]:
    """Options by which etcd shows a certificate."""
    return ["--cert-file", files / f"{name}.pem", "--key-file", files / f"{name}.key"]


@pytest.fixture(scope="module")
def etcds(files: Path, start_etcd: Callable[..., str]) -> dict[str, str]:
    """Addresses: of one that speaks plain HTTP, one with TLS, one of another name, one that wants certificates."""
    wanted = ["--client-cert-auth", "--trusted-ca-file", files / "ours.pem"]
    found = {
        "plain": start_etcd(),
        "tls": start_etcd(*shown(files, "server"), protocol="https"),
        "elsewhere": start_etcd(*shown(files, "elsewhere"), protocol="https"),
        "mutual": start_etcd(*shown(files, "server"), *wanted, protocol="https"),
    }
    EtcdClient([found["plain"]], prefix="/", timeout_s=20).close()
    for name in ("tls", "mutual"):
        EtcdClient([found[name]], prefix="/", timeout_s=20, access=access_of(files, mine="host")).close()
    return found


def access_of(files: Path, *, signer: str | None = "ours", mine: str | None = None) -> EtcdAccess:
    names = {"cacert": signer, "cert": mine}
    given = {name: str(files / f"{value}.pem") for name, value in names.items() if value}
    if mine:
        given["key"] = str(files / f"{mine}.key")
    return EtcdAccess(protocol="https", **given)


@pytest.fixture(scope="module")
def guarded(start_etcd: Callable[..., str]) -> str:
    """One with users: root, train for keys under /jaxpar/, and other for none. Tokens live for a second."""
    address = start_etcd("--auth-token-ttl", 1, "--bcrypt-cost", 4)
    root = Gateway([address], EtcdAccess(), timeout_s=20)
    for name, password in (("root", "r"), ("train", PASSWORD), ("other", PASSWORD)):
        root.ask("auth/user/add", {"name": name, "password": password})
        root.ask("auth/role/add", {"name": name})
        root.ask("auth/user/grant", {"user": name, "role": name})
    under = {"key": "L2pheHBhci8=", "range_end": "L2pheHBhcjA="}  # from "/jaxpar/" to "/jaxpar0", in base64
    root.ask("auth/role/grant", {"name": "train", "perm": {"permType": "READWRITE", **under}})
    root.ask("auth/enable", {})
    root.close()
    return address


def test_with_tls_all_is_as_without(etcds: dict[str, str], files: Path) -> None:
    for name, mine in (("tls", None), ("mutual", "host")):
        with EtcdClient(
            [etcds[name]], prefix="/a/", timeout_s=5, access=access_of(files, mine=mine)
        ) as client:
            client.set("x", [1])
            with client.clone() as other:
                assert other.compare_set("x", [1], [2]) == [2]
            assert client.get("x") == [2] and client.delete_prefix("") == 1


@pytest.mark.parametrize(
    ("name", "signer", "mine", "message"),
    [
        (
            "tls",
            None,
            None,
            "certificate of etcd at .* is not trusted: .*Name the file .*--rdzv-conf cacert=FILE",
        ),
        ("tls", "theirs", None, "certificate of etcd at .* is not trusted: .*--rdzv-conf cacert=FILE"),
        ("elsewhere", "ours", None, "not valid for '127.0.0.1'. Name etcd in --rdzv-endpoint as its"),
        ("mutual", "ours", None, "wants a certificate of this host that it trusts, and none was shown"),
        ("mutual", "ours", "theirs", r"that it trusts, not that of .*theirs.pem: .*Write --rdzv-conf cert="),
        ("plain", "ours", None, "speaks plain HTTP: leave protocol=https and https:// out"),
    ],
)
def test_whom_nobody_trusts_is_said_at_once(name, signer, mine, message, etcds, files) -> None:
    start = time.monotonic()
    with pytest.raises(StoreAuthenticationError, match=message):
        EtcdClient([etcds[name]], prefix="/", timeout_s=60, access=access_of(files, signer=signer, mine=mine))
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("name", ["tls", "mutual"])
def test_plain_http_is_not_spoken_to_tls(name: str, etcds: dict[str, str]) -> None:
    start = time.monotonic()
    expected = f"etcd at {etcds[name]} speaks TLS: write --rdzv-conf protocol=https, or --rdzv-endpoint https://{etcds[name]}"
    with pytest.raises(StoreAuthenticationError, match=re.escape(expected)):
        EtcdClient([etcds[name]], prefix="/", timeout_s=60)
    assert time.monotonic() - start < 10


def test_of_several_it_is_enough_that_one_is_trusted(etcds: dict[str, str], files: Path) -> None:
    both = [etcds["elsewhere"], etcds["tls"]]
    with EtcdClient(both, prefix="/b/", timeout_s=10, access=access_of(files)) as client:
        client.set("x", 1)
        assert client.try_get("x") == 1


def test_a_user_with_the_password_of_the_variable_or_of_a_file(guarded, tmp_path, monkeypatch) -> None:
    (tmp_path / "password").write_text(PASSWORD + "\n")
    in_file = EtcdAccess(user="train", password_file=str(tmp_path / "password"))
    with EtcdClient([guarded], prefix="/jaxpar/a/", timeout_s=5, access=in_file) as client:
        client.set("x", 1)
        (tmp_path / "password").unlink()  # who was let in stays in
        with client.clone() as other:
            assert other.get("x") == 1
    monkeypatch.setenv("JAXPAR_ETCD_PASSWORD", PASSWORD)
    with EtcdClient([guarded], prefix="/jaxpar/a/", timeout_s=5, access=EtcdAccess(user="train")) as client:
        assert client.get("x") == 1


def test_a_token_that_has_expired_is_renewed(guarded: str, monkeypatch) -> None:
    monkeypatch.setenv("JAXPAR_ETCD_PASSWORD", PASSWORD)
    with EtcdClient([guarded], prefix="/jaxpar/b/", timeout_s=5, access=EtcdAccess(user="train")) as client:
        first = client._gateway._token
        time.sleep(2.5)  # etcd looks once a second which have expired
        client.set("x", 1)
        assert client.get("x") == 1
        assert client._gateway._token not in (None, first)


@pytest.mark.parametrize(
    ("user", "password", "message"),
    [
        (None, None, r"it wants a user: add --rdzv-conf user=NAME, and set JAXPAR_ETCD_PASSWORD"),
        ("train", "guessed", "user 'train' or the password is wrong"),
        ("nobody", PASSWORD, "user 'nobody' or the password is wrong"),
        (
            "other",
            PASSWORD,
            "user 'other' may not use these keys: etcdctl role grant-permission ROLE readwrite",
        ),
    ],
)
def test_who_may_not_is_told_why(user, password, message, guarded, monkeypatch) -> None:
    if password:
        monkeypatch.setenv("JAXPAR_ETCD_PASSWORD", password)
    with pytest.raises(StoreAuthenticationError, match=message) as e:
        EtcdClient([guarded], prefix="/jaxpar/a/", timeout_s=60, access=EtcdAccess(user=user))
    assert password is None or password not in str(e.value)


def test_a_password_that_nobody_asks_for_is_an_error(etcds: dict[str, str], monkeypatch) -> None:
    monkeypatch.setenv("JAXPAR_ETCD_PASSWORD", "x")
    with pytest.raises(StoreAuthenticationError, match="its authentication is switched off"):
        EtcdClient([etcds["plain"]], prefix="/", timeout_s=60, access=EtcdAccess(user="train"))


@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ("protocol=ftp", "protocol=ftp: etcd speaks http or https"),
        ("cacert={0}/ours.pem", "is for TLS: add protocol=https, or write --rdzv-endpoint https://"),
        ("protocol=https,cacert={0}/none.pem", "/none.pem is no file. Write cacert=FILE"),
        ("protocol=https,key={0}/host.key", "belongs to a certificate: add cert=FILE"),
        ("protocol=https,ca_cert={0}/none.pem", "/none.pem is no file. Write cacert=FILE"),
        ("password_file={0}/host.key", "is whose? Add user=NAME"),
        ("user=train,password=secret", "password=...: everybody on this host can read a command line"),
        ("user=train:secret", "a password stands on no command line. Write user=NAME"),
        ("user=", "--rdzv-conf user=: not name=seconds with a name of join_timeout"),
        ("keepalive=3", "keepalive=3: not name=seconds with a name of join_timeout"),
    ],
)
def test_a_wrong_conf_is_explained(conf: str, message: str, files: Path, capsys) -> None:
    line = ["--nnodes", "2", "--rdzv-backend", "etcd", "--rdzv-endpoint", "etcd0", "--rdzv-conf"]
    assert main([*line, conf.format(files), "--dry-run", "--no-python", "true"]) == 2
    told = capsys.readouterr().err
    assert message in told and "secret" not in told


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(cacert="ours.key"), "ours.key holds no certificate in PEM form"),
        (dict(cert="host.pem", key="theirs.key"), "these are no certificate and its key in PEM form"),
        (dict(cert="host.pem"), "these are no certificate and its key in PEM form"),
        (dict(cert="host.pem", key="locked.key"), "locked.key is encrypted, and nobody is there to type"),
    ],
)
def test_files_that_hold_something_else_are_named(given: dict[str, str], message: str, files: Path) -> None:
    access = EtcdAccess(protocol="https", **{name: str(files / file) for name, file in given.items()})
    with pytest.raises(LaunchSpecError, match=message):
        access.tls()


def test_a_user_needs_a_password(tmp_path: Path) -> None:
    with pytest.raises(LaunchSpecError, match="user=train: JAXPAR_ETCD_PASSWORD holds no password"):
        EtcdAccess(user="train").password()
    (tmp_path / "empty").touch()
    with pytest.raises(LaunchSpecError, match="user=train: .*/empty holds no password"):
        EtcdAccess(user="train", password_file=str(tmp_path / "empty")).password()


def test_the_protocol_may_stand_before_the_endpoint() -> None:
    options = {"nnodes": "2", "rdzv_backend": "etcd", "rdzv_endpoint": "https://a,https://b:1/"}
    meeting = rendezvous_of(options)
    assert meeting is not None
    assert (meeting.endpoint, meeting.conf.etcd.protocol) == ("a:2379,b:1", "https")
    for change, message in (
        ({"rdzv_endpoint": "https://a,b"}, "all servers of one etcd speak the same"),
        ({"rdzv_conf": "protocol=http"}, "protocol=http contradicts --rdzv-endpoint https://"),
        (
            {"rdzv_backend": "c10d", "rdzv_endpoint": "https://a"},
            "Add --rdzv-backend etcd, or leave them out",
        ),
    ):
        with pytest.raises(LaunchSpecError, match=message):
            rendezvous_of(options | change)
    with pytest.raises(LaunchSpecError, match="'https://a:1' is no host:port. Write conf=RendezvousConf"):
        RendezvousSpec(endpoint="https://a:1", least=1, most=1, backend="etcd")
    assert RendezvousConf.parse("user=a").etcd == EtcdAccess(user="a")


def test_hosts_meet_at_a_guarded_etcd_and_workers_never_see_the_password(guarded, script, command) -> None:
    path = script("""
        import os
        print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], os.environ.get("JAXPAR_ETCD_PASSWORD"))
    """)
    command.environ["JAXPAR_ETCD_PASSWORD"] = PASSWORD
    line = ["--nnodes", 2, "--rdzv-backend", "etcd", "--rdzv-endpoint", guarded, "--rdzv-id", "meet"]
    launchers = [command.start(*line, "--rdzv-conf", f"{FAST},user=train", path) for _ in range(2)]
    ended = [launcher.communicate(timeout=30) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], ended
    assert sorted(stdout for stdout, _ in ended) == [f"[rank {i}] rank {i} of 2 None\n" for i in range(2)]
    command.environ["JAXPAR_ETCD_PASSWORD"] = "wrong"
    done = command(*line, "--rdzv-conf", "user=train", path)
    assert done.returncode == 1 and "or the password is wrong" in done.stderr
    del command.environ["JAXPAR_ETCD_PASSWORD"]
    done = command(*line, "--rdzv-conf", "user=train", path)
    assert done.returncode == 2 and "JAXPAR_ETCD_PASSWORD holds no password" in done.stderr


def test_threads_share_nothing_but_the_token(guarded: str, monkeypatch) -> None:
    monkeypatch.setenv("JAXPAR_ETCD_PASSWORD", PASSWORD)
    with EtcdClient([guarded], prefix="/jaxpar/c/", timeout_s=5, access=EtcdAccess(user="train")) as client:
        clones = [client.clone() for _ in range(4)]
        threads = [threading.Thread(target=clone.set, args=(str(i), i)) for i, clone in enumerate(clones)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=10)
        for clone in clones:
            clone.close()
        assert client.keys() == ["0", "1", "2", "3"]
