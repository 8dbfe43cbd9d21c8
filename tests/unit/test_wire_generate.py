"""The generated code is fresh, and stale code is noticed."""

from __future__ import annotations

from moe_autograd.wire import generate


def test_the_committed_code_is_what_the_proto_gives():
    assert generate.stale_files() == []


def test_stale_code_is_named_and_ends_with_status_1(monkeypatch, tmp_path, capsys):
    generate.generate(tmp_path)
    folder = tmp_path / "moe_autograd/wire"
    (folder / "experts_pb2.py").write_text("# of yesterday\n")
    monkeypatch.setattr(generate, "_FOLDER", folder)
    assert generate.main(["--check"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith("experts_pb2.py: not what")
    assert "make proto" in complaint


def test_another_argument_is_refused(capsys):
    assert generate.main(["--chek"]) == 2
    assert "--chek" in capsys.readouterr().err
