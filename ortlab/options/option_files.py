"""The files and folders that options name, looked at when an option is set and not when a build trips over them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

from ortlab.errors import OptionError
from ortlab.options.triton_config import TritonConfig, read_triton_config

if TYPE_CHECKING:
    from collections.abc import Collection

    from ortlab.options.options import Options


def with_files(options: Options, changed: Collection[str]) -> Options:
    """Read what changed options name, refuse what cannot be used, and return the options with the Triton configuration.

    `changed` names the options that somebody has given a value. A file that was read before is not read again. Raises
    OptionError where a file is absent, unreadable or wrong, or a folder cannot be written.
    """
    if options.triton_config_file and not isinstance(options.triton_config_file, TritonConfig):
        options = options.replace(triton_config_file=read_triton_config(options.triton_config_file))
    if options.tuning_results_path and {"tuning_results_path", "tuning"} & set(changed):
        _check_tuning_results(Path(options.tuning_results_path), write=options.tuning)
    if {"save_onnx", "save_onnx_path"} & set(changed):
        check_onnx_folder(options)
    if options.export_cache_dir and "export_cache_dir" in changed:
        check_export_folder(options)
    return options


def check_export_folder(options: Options) -> None:
    """Raise OptionError for a folder for exports that no file can be made in, or others can; an absent one is made."""
    folder = Path(options.export_cache_dir).absolute()
    if reason := _no_file_in(folder, make=True):
        raise OptionError(
            f"Exports cannot be kept in {str(folder)!r}.",
            why=reason,
            fix="Set export_cache_dir to a folder that can be written, or leave it empty.",
        )
    if reason := writable_by_others(folder):
        raise OptionError(
            f"Exports are not kept in {str(folder)!r}: others could put graphs there, and your model would run them.",
            why=reason,
            fix=f"Make it yours alone (chmod go-w {folder}), or set export_cache_dir to a folder in your home.",
        )


def writable_by_others(path: Path) -> str:
    """Say who else than this user and root can write a file, or to a folder; empty where nobody can."""
    if os.name != "posix":
        return ""
    state = path.stat()
    if state.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {state.st_uid}."
    if state.st_mode & stat.S_IWOTH:
        return f"Every user can write to {path}."
    if state.st_mode & stat.S_IWGRP and not _is_own_group(state.st_gid):
        return f"Group {state.st_gid} can write to {path}."
    return ""


def _is_own_group(number: int) -> bool:
    """Tell whether a group has nobody but this user in it, as many systems make one for each user."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == user and set(group.gr_mem) <= {user}


def with_usable_export_folder(options: Options) -> tuple[Options, str]:
    """Return options whose ORTMODULE_CACHE_DIR can be used, and a note about it.

    The variable may be set for other programs, so a folder that cannot be written is no reason not to train here.
    """
    try:
        check_export_folder(options)
    except OptionError as error:
        return options.replace(
            export_cache_dir=""
        ), f"ORTMODULE_CACHE_DIR is ignored: {error.what} {error.why}"
    return options, (
        f"Exports are kept in {options.export_cache_dir}, in files of ortlab's own; those that ORTModule may have put "
        "there are not used."
    )


def check_onnx_folder(options: Options) -> None:
    """Raise OptionError where graphs are to be saved, and their folder is absent, no folder, or refuses a file."""
    if not options.save_onnx:
        return
    folder = Path(options.save_onnx_path).absolute()
    if reason := _no_file_in(folder):
        raise OptionError(
            f"Graphs cannot be saved in {str(folder)!r}.",
            why=reason,
            fix="Make the folder, or set save_onnx_path to one that is there and can be written.",
        )


def _no_file_in(folder: Path, *, make: bool = False) -> str:
    """Say why no file can be made in a folder, which `make` makes first; empty where one can."""
    try:
        if make:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        # The permission bits do not tell: they say nothing to root, and nothing about /proc or a full disk.
        with TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"A file cannot be made there: {error.strerror}."


def triton_configuration(options: Options) -> dict[str, object]:
    """Return what the Triton configuration of these options holds; empty for ORT's own.

    Raises OptionError where it has not been read yet, and cannot be.
    """
    value = options.triton_config_file
    if not value:
        return {}
    config = value if isinstance(value, TritonConfig) else read_triton_config(value)
    content: dict[str, object] = json.loads(config.content)
    return content


def _check_tuning_results(folder: Path, *, write: bool) -> None:
    if write:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        if not there.is_dir():
            raise _refusal(folder, f"{there} is no folder.", write=write)
        if not os.access(there, os.W_OK | os.X_OK):
            raise _refusal(folder, f"{there} cannot be written.", write=write)
        return
    # 1.19.2 reads this one (_utils.set_tuning_results), and silently passes over it if it is not there.
    file = folder / "tuning_results_training.json"
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(folder, f"{file} cannot be read: {error.strerror}.", write=write) from None
    except ValueError as error:
        raise _refusal(folder, f"{file} is not JSON: {error}.", write=write) from None


def _refusal(folder: Path, why: str, *, write: bool) -> OptionError:
    if write:
        fix = "Name a folder that can be written, or set tuning_results_path='' to keep nothing."
    else:
        fix = "Set tuning=True as well to write results there first, or tuning_results_path='' to use none."
    return OptionError(f"tuning_results_path {str(folder)!r} cannot be used.", why=why, fix=fix)
