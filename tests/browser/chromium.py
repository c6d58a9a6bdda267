"""What the browser tests need beyond Python: `python -m tests.browser.chromium` installs it where possible.

Chromium is Debian's own package, axe-core comes from npm by name. If one is not available, the tests that need it
are skipped with a message.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

AXE = Path(sys.prefix) / "npm" / "node_modules" / "axe-core" / "axe.min.js"
_AXE_VERSION = "4.14.0"

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def install() -> None:
    if chromium() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print("Installing Chromium for the browser tests ...", flush=True)
        _try("apt-get", "update", "-qq")
        _try("apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium")
    if not AXE.exists() and (npm := shutil.which("npm")):
        _try(npm, "install", "--silent", "--no-save", "--prefix", str(AXE.parents[2]), f"axe-core@{_AXE_VERSION}")
    for found, what in ((chromium(), "Chromium"), (AXE.exists(), "axe-core")):
        if not found:
            print(f"{what} is not here and could not be installed: tests that need it are skipped.")


def _try(*command: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=300, check=False
    )


if __name__ == "__main__":
    install()
