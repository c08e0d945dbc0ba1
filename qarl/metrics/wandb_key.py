"""Whether W&B can log in without a question. Without a key, `wandb.init` would wait for one at the terminal.

The places are those that W&B reads (docs.wandb.ai, environment variables and `wandb login`): variables, .netrc, and the
settings files.
"""

from __future__ import annotations

import configparser
import netrc
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from qarl.errors import UserError

_WITHOUT_KEY = ("offline", "disabled", "dryrun")
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_wandb_key() -> None:
    """Raise UserError if W&B would have to ask for a key."""
    settings = _settings()
    mode = os.environ.get("WANDB_MODE") or settings.get("mode", "online")
    if mode in _WITHOUT_KEY or any(os.environ.get(name) for name in _KEYS) or settings.get("api_key"):
        return
    address = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai"
    host = urlsplit(address).hostname or address
    if not _in_netrc(host):
        raise UserError(
            "the logger wandb is chosen, but W&B has no key",
            where="trainer.logger",
            why=f"neither WANDB_API_KEY nor .netrc has a key for {host}, and a run cannot ask for one",
            fix="run `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline; or remove wandb from trainer.logger",
        )


def _settings() -> dict[str, str]:
    """Return W&B's settings of this user and of this folder, which has precedence."""
    home = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    with suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser.read([home / "settings", Path("wandb") / "settings"], encoding="utf-8")
    return dict(parser["default"]) if parser.has_section("default") else {}


def _in_netrc(host: str) -> bool:
    given = os.environ.get("NETRC")
    for path in [given] if given else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(Path(path).expanduser()).authenticators(host):
                return True
    return False
