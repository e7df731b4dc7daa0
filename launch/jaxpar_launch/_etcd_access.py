"""How etcd is spoken to, and as whom: what `--rdzv-conf` says beside seconds.

    protocol=https,cacert=ca.pem                  etcd shows a certificate that ca.pem signed; without cacert: one of the system's CAs
    cert=host.pem,key=host.key                    this host shows one too (etcd --client-cert-auth)
    user=train,password_file=/run/secrets/etcd    a user of etcd; without the file its password is JAXPAR_ETCD_PASSWORD

A password never stands on a command line, which everybody on the host can read, and never reaches the workers. Without TLS it
travels as plain text. Names are those of torchrun's two etcd backends.
"""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from jaxpar_launch._errors import LaunchSpecError
from jaxpar_launch.env import option_from_environ

if TYPE_CHECKING:
    import ssl

PASSWORD_FLAG = "--etcd-password"  # only ever a variable: JAXPAR_ETCD_PASSWORD
OTHER_NAMES = {"ca_cert": "cacert", "ssl_cert": "cert", "ssl_cert_key": "key"}
_FILES = ("cacert", "cert", "key", "password_file")


@dataclass(frozen=True, kw_only=True)
class EtcdAccess:
    """How etcd is reached (`--rdzv-conf protocol=https,cacert=ca.pem,user=train`).

    Args:
        protocol: "http" or "https".
        cacert: file with the certificate of who signed etcd's; None: one of those that this system trusts.
        cert: file with the certificate that this host shows; None: none.
        key: file with its key; None: it is in the same file.
        user: name of a user of etcd; None: etcd asks for none.
        password_file: file with the password; None: the variable JAXPAR_ETCD_PASSWORD holds it.

    Raises:
        LaunchSpecError: what does not fit together, or a file that is not there.

    Example:
        >>> EtcdAccess(cacert="ca.pem")
        Traceback (most recent call last):
        jaxpar_launch._errors.LaunchSpecError: --rdzv-conf cacert=ca.pem is for TLS: add protocol=https, or ...
    """

    protocol: str = "http"
    cacert: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password_file: str | None = None

    def __post_init__(self) -> None:
        if self.protocol not in ("http", "https"):
            raise LaunchSpecError(
                f"--rdzv-conf protocol={self.protocol}: etcd speaks http or https. Write protocol=https."
            )
        for name in ("cacert", "cert", "key"):
            if self.protocol == "http" and getattr(self, name):
                raise LaunchSpecError(
                    f"--rdzv-conf {name}={getattr(self, name)} is for TLS: add protocol=https, or write --rdzv-endpoint https://HOST:2379."
                )
        if self.key and not self.cert:
            raise LaunchSpecError(
                f"--rdzv-conf key={self.key} belongs to a certificate: add cert=FILE, or leave it out."
            )
        if self.password_file and not self.user:
            raise LaunchSpecError(
                f"--rdzv-conf password_file={self.password_file} is whose? Add user=NAME, or leave it out."
            )
        if self.user and ":" in self.user:
            raise LaunchSpecError(
                f"--rdzv-conf user={self.user.partition(':')[0]}:...: a password stands on no command line. Write user=NAME, and put "
                "the password into JAXPAR_ETCD_PASSWORD or password_file=FILE."
            )
        for name in _FILES:
            _check_readable(name, getattr(self, name))

    def password(self) -> str | None:
        """The user's password; None without a user.

        Raises:
            LaunchSpecError: there is none.
        """
        if self.user is None:
            return None
        if self.password_file:
            with open(self.password_file) as file:
                password, place = file.read().rstrip("\r\n"), self.password_file
        else:
            password, place = option_from_environ(PASSWORD_FLAG), "JAXPAR_ETCD_PASSWORD"
        if not password:
            raise LaunchSpecError(
                f"--rdzv-conf user={self.user}: {place} holds no password. Set JAXPAR_ETCD_PASSWORD, or add password_file=FILE."
            )
        return password

    def tls(self) -> "ssl.SSLContext | None":
        """What a TLS connection needs; None for plain HTTP.

        Raises:
            LaunchSpecError: a file holds no certificate, or a key that is another one's.
        """
        if self.protocol == "http":
            return None
        import ssl  # who does not use it starts faster without

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificate and name
        try:
            if self.cacert is None:
                context.load_default_certs()
            else:
                context.load_verify_locations(self.cacert)
        except OSError as error:
            raise LaunchSpecError(
                f"--rdzv-conf cacert={self.cacert} holds no certificate in PEM form: {error}."
            ) from error
        try:
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password=self._no_passphrase)
        except OSError as error:
            files = f"cert={self.cert}" + (f",key={self.key}" if self.key else "")
            raise LaunchSpecError(
                f"--rdzv-conf {files}: these are no certificate and its key in PEM form: {error}. Without key=FILE both stand in one file."
            ) from error
        return context

    def _no_passphrase(self) -> NoReturn:
        raise LaunchSpecError(
            f"--rdzv-conf key={self.key or self.cert} is encrypted, and nobody is there to type its passphrase. Give it without one, "
            "readable by this user only."
        )


def _check_readable(name: str, path: str | None) -> None:
    if path is None or (os.path.isfile(path) and os.access(path, os.R_OK)):
        return
    why = "is not readable by this user" if os.path.isfile(path) else "is no file"
    raise LaunchSpecError(f"--rdzv-conf {name}={path}: {os.path.abspath(path)} {why}. Write {name}=FILE.")
