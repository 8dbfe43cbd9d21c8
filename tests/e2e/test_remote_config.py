"""`connect` from a TOML file: what it sets, and what it says of every mistake."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import SecurityConfig, ServingConfig
from moe_autograd.errors import ConfigError
from moe_autograd.remote import TLS, Compression, HedgePolicy, RetryPolicy, connect
from moe_autograd.remote.config import load_config
from moe_autograd.wire.tokens import read_token
from tests.support.certificates import make_authority, make_certificates

TOKEN = "train-token-0123456789"
EVERYTHING = """
addresses = ["experts.example:31415", "[::1]:7"]
token_file = "token"
timeout_s = 7
allow_missing = true
max_tensor_bytes = 1000
compression = { forward = "int8" }
hedge = { quantile = 0.9, first_after_s = 0.5 }

[tls]
ca_file = "certificates/ca.pem"
server_name = "localhost"

[retry]
patience_s = 60
max_retries = 3
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "placement.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_every_key_means_the_argument_of_its_name(tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "certificates").mkdir()
    make_authority(tmp_path / "certificates")
    assert load_config(write(tmp_path, EVERYTHING)) == {
        "addresses": ["experts.example:31415", "[::1]:7"],
        "token": tmp_path / "token",
        "timeout_s": 7.0,
        "allow_missing": True,
        "max_tensor_bytes": 1000,
        "compression": Compression(forward="int8"),
        "hedge": HedgePolicy(quantile=0.9, first_after_s=0.5),
        "tls": TLS(ca_file=tmp_path / "certificates/ca.pem", server_name="localhost"),
        "retry": RetryPolicy(patience_s=60.0, max_retries=3),
    }


def test_the_documented_file_has_every_key(tmp_path):
    page = (Path(__file__).parents[2] / "docs/remote.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```toml\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "token").write_text(TOKEN)
    make_certificates(tmp_path)
    settings = load_config(write(tmp_path, text))
    arguments = inspect.signature(connect).parameters
    assert settings.keys() == arguments.keys()
    assert settings["retry"] == RetryPolicy()
    assert all(
        f"{field.name} = " in text for made in (RetryPolicy, HedgePolicy, TLS) for field in fields(made)
    )
    unchanged = ("timeout_s", "allow_missing", "max_tensor_bytes", "hedge")
    assert {name: settings[name] for name in unchanged} == {
        name: arguments[name].default for name in unchanged
    }


@pytest.mark.parametrize("as_text", [False, True], ids=["a path", "a text"])
def test_experts_are_found_and_called(tmp_path, as_text):
    with ExpertsServer({"ffn.0": nn.Linear(4, 4)}) as server:
        file = write(tmp_path, f"addresses = [{server.address!r}]\ncompression = 'bfloat16'\nhedge = true")
        with connect(str(file) if as_text else file, timeout_s=60.0) as experts:
            assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)
            assert experts.connection.addresses == (server.address,)


def test_a_file_may_begin_as_windows_has_it(tmp_path):
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8-sig")
    file = tmp_path / "placement.toml"
    file.write_text("addresses = ['a:1']\r\ntoken_file = 'token'\r\n", encoding="utf-8-sig", newline="")
    arguments = load_config(file)
    assert arguments == {"addresses": ["a:1"], "token": tmp_path / "token"}
    assert read_token(arguments["token"]) == TOKEN


def test_tls_and_token_come_from_files_beside_it(tmp_path, monkeypatch):
    make_certificates(tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "tokens").write_text(f"train {TOKEN}\n")
    security = SecurityConfig(
        tls_cert=tmp_path / "server.pem", tls_key=tmp_path / "server.key", tokens_file=tmp_path / "tokens"
    )
    monkeypatch.chdir("/")
    with ExpertsServer({"ffn.0": nn.Linear(4, 4)}, config=ServingConfig(security=security)) as server:
        text = f"addresses = [{server.address!r}]\ntoken_file = 'token'\n[tls]\nca_file = 'ca.pem'"
        with connect(write(tmp_path, text)) as experts:
            assert list(experts) == ["ffn.0"]


ADDRESSES = "addresses = ['127.0.0.1:9']\n"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "key 'addresses': expected a list of host:port, got none. Set it."),
        ("addresses = []", "key 'addresses': addresses: expected at least one host:port, got none."),
        ("addresses = 'a:1'", "key 'addresses': expected a list of host:port, got 'a:1'."),
        ("addresses = ['a']", "key 'addresses': address: expected host:port, got 'a'."),
        ("addresses = [1]", "key 'addresses': address: expected host:port, got 1."),
        (
            ADDRESSES + "timeout = 3",
            "key 'timeout': expected one of addresses, allow_missing, compression, hedge, max_tensor_bytes, retry, "
            "timeout_s, tls, token, token_file, got an unknown key (value 3). Did you mean 'timeout_s'?",
        ),
        (
            ADDRESSES + "timeout_s = 0",
            "key 'timeout_s': timeout_s: expected a positive, finite number of seconds",
        ),
        (ADDRESSES + "timeout_s = inf", "finite number of seconds (up to 1e+08), got inf."),
        (ADDRESSES + "allow_missing = 1", "key 'allow_missing': expected true or false, got 1."),
        (ADDRESSES + "max_tensor_bytes = 1.5", "expected a positive whole number, got 1.5."),
        (ADDRESSES + "compression = 'zip'", "key 'compression': compression: expected one of"),
        (ADDRESSES + "compression = { backward = 'float16' }", "got 'float16' (backward)"),
        (ADDRESSES + "tls = true", "key 'tls': expected a table, got True."),
        (ADDRESSES + "[tls]\ncert_file = 'a'", "key 'tls': TLS: expected cert_file and key_file together"),
        (ADDRESSES + "[tls]\nca_file = 'none.pem'", "key 'tls': expected a readable file, got '"),
        (
            ADDRESSES + "[tls]\nca_file = 'placement.toml'",
            "key 'tls': TLS: expected certificates as PEM, got '",
        ),
        (ADDRESSES + "timeout_s = 1e300", "key 'timeout_s': timeout_s: expected a positive, finite number"),
        (
            ADDRESSES + "[tls]\nca = 'a'",
            "key 'tls.ca': expected one of ca_file, cert_file, key_file, server_name",
        ),
        (
            ADDRESSES + "[retry]\nmax_retries = -1",
            "key 'retry.max_retries': RetryPolicy: expected max_retries to be a finite whole number of at least 0",
        ),
        (
            ADDRESSES + f"[retry]\npatience_s = {'9' * 400}",
            "key 'retry.patience_s': RetryPolicy: expected patience_s to be a finite number of at least 0, got 999",
        ),
        (
            ADDRESSES + "[hedge]\nquantile = 1",
            "key 'hedge.quantile': HedgePolicy: expected 0 < quantile < 1 and a positive first_after_s",
        ),
        (ADDRESSES + "[hedge]\nfirst_after_s = 'soon'", "key 'hedge.first_after_s': HedgePolicy: expected"),
        (
            ADDRESSES + "token_file = 'a-token'",
            "key 'token_file': expected a readable text file, got none (No such file or directory). Check the path.",
        ),
        (ADDRESSES + "token = ''", "key 'token': expected a text that is not empty, got a str."),
        (
            ADDRESSES + "token = 'a'\ntoken_file = 'placement.toml'",
            "expected only one of token and token_file",
        ),
        ("addresses = [", "expected TOML, got a file that does not parse"),
    ],
)
def test_every_mistake_names_key_value_and_what_is_allowed(tmp_path, text, mistake):
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        connect(file)
    assert mistake in str(raised.value)
    assert str(raised.value).startswith(f"config {str(file)!r}")


def test_a_token_in_the_place_of_its_file_is_not_shown(tmp_path):
    token = "3f786850e387550fdab836ed7e6dc881"
    for connect_so in (
        lambda: connect(write(tmp_path, ADDRESSES + f"token_file = '{token}'")),
        lambda: connect("127.0.0.1:1", token=Path(token)),
    ):
        with pytest.raises(ValueError) as raised:
            connect_so()
        assert token not in str(raised.value)


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as raised:
        connect(write(tmp_path, "addresses = ['a']\ntimeout_s = 0\n[retry]\nbudget = 'big'"))
    assert len(str(raised.value).splitlines()) == 3


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        connect(tmp_path / "none.toml")


def test_what_can_be_no_files_name_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config 'a\\x00\.toml': expected the name of a file"):
        connect("a\0.toml")


def test_a_setting_in_both_places_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match="key 'timeout_s': expected it in the file or as an argument, got both"
    ):
        connect(write(tmp_path, ADDRESSES + "timeout_s = 3"), timeout_s=4.0)
