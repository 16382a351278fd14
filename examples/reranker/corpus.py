"""Pairs of a question and its passage, out of the manual pages of Debian packages.

Owns: which packages, how a page becomes a Page, which pages are held out.
Must not know: models, training.
Invariant: a page's side (`split`) depends on its package and name alone, so it never changes with what else is read.

Needs Debian's `apt-get`, `dpkg-deb` and `groff` (package groff-base).
"""

import gzip
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "held_out", "unseen_packages"]

PACKAGES = {  # of Debian 12 (bookworm): (name, version) -> SHA-256 of the .deb
    ("coreutils", "9.1-1"): "61038f857e346e8500adf53a2a0a20859f4d3a3b51570cc876b153a2d51a3091",
    ("debhelper", "13.11.4"): "bd764e98a9204a4b6b2d9e7b461c50fdae579314309804baff93d21e0498b64b",
    ("git-man", "1:2.39.5-0+deb12u3"): "904dbd8dbc3db34c6780fb0abfe35816d4a90a490126ef0a055a77a0c5dcab82",
    ("grass-doc", "8.2.1-1"): "0f6da53d1f7d51b019dfe64bf45718b64022989afc94bb6c833f495aa2f61ff7",
    ("groff", "1.22.4-10"): "c30d56dad45ab7fe8d57f545381203297b23fabd7475e5acd133f15dcaef2355",
    ("inn2", "2.7.1-1+deb12u1"): "a933dc630a9ef1255c25f1ebf381c091c636a7a04facd910959a8a3db8595c23",
    ("iproute2", "6.1.0-3"): "1204b29e916e836267096d0b9d778106752f821ebde0d281539008b4386d9070",
    ("libcurl4-doc", "7.88.1-10+deb12u15"): "34fe1d613c249a9f02696777cbc06f95c50ea030413d596262f3a03aaf12eb62",
    ("libibverbs-dev", "44.0-2"): "78e87d12fb642bc41b04cb2e2f3f2f23cee14b89978a846b83defe945f388f72",
    ("libldap-dev", "2.5.13+dfsg-5"): "8ffade80f355bff555db98c39c40a51837a491f358d52a558520bfe02b1ec4f3",
    ("libmotif-dev", "2.3.8-3"): "6928cd77f80700b7262188bca9c39e2727e3541c585d6d914ea4ee714681a96b",
    ("libssl-doc", "3.0.20-1~deb12u2"): "288301da4a89227dfbb98fe498894e1f79aeda29d0aae4a84fb7db4fc0d3fba4",
    ("lvm2", "2.03.16-2"): "608ae8de670342fc80d388185be64af9c886e61d145669a606db002663f7fd82",
    ("manpages", "6.03-2"): "efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91",
    ("manpages-dev", "6.03-2"): "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838",
    ("ncurses-doc", "6.4-4"): "c3dab5d65bfd62a7468daacf59c63f15fb627fe4e4d105b54777a370d0c6df77",
    ("netpbm", "2:11.01.00-2"): "24f1ac9e424cfa097c38dc1108638762fd2f04f9e1182245382ed15bc3e04438",
    ("openmpi-doc", "4.1.4-3"): "f297ec1e56a40a48b475cb62ab6283b6d2dd3cdb4f948a68c3c41cdeaaeb63c3",
    ("perl-doc", "5.36.0-7+deb12u3"): "e9e3564ff5ade27de0585835f2acad769bcc545c0a0045a9f55d5401f27f7591",
    ("systemd", "252.39-1~deb12u2"): "286f879c537bfba92e59d580c075ad20ab49020244c79634656850a306dd462b",
    ("tcl8.6-doc", "8.6.13+dfsg-2"): "e6468aa726a0d77f3e61ae4714bcf7c4c4ddd02828388977f765ffdda4935876",
    ("tcllib", "1.21+dfsg-1"): "6bf4cbb66b52d47dcf02e8de4469597d25dc475668d49f8b7f3f3135e3eb2d08",
    ("tk8.6-doc", "8.6.13-2"): "8e93967b9d5d36e2eff002f27261b93417a7c439a8207932fe8335f0ac84b407",
    ("util-linux", "2.38.1-5+deb12u3"): "8eb241ff24b2e1ee9c0373f4fc9bc728b85bf5966c1496154df7da01c0e42f34",
}
UNSEEN = frozenset({"coreutils", "git-man", "util-linux"})
"""Packages no page of which is trained on."""
HELD_OUT_PERCENT = 15  # of the pages of every other package
MIN_WORDS, MAX_WORDS = 30, 80
"""Paragraphs are added to a passage until it has the first number of words, and cut at the second."""
_GROFF = ["groff", "-mandoc", "-t", "-Tascii", "-P-cbou", "-rLL=9999n", "-rHY=0"]
_MAN_PATH = re.compile(r"\./usr/share/man/man\d\w*/([^/]+)\.\d\w*\.gz")


@dataclass(frozen=True)
class Page:
    """`query`: the page's one-line description. `passage`: how its DESCRIPTION begins."""

    package: str
    name: str
    query: str
    passage: str

    @property
    def split(self) -> Split:
        if self.package in UNSEEN:
            return "unseen_packages"
        digest = hashlib.sha256(f"{self.package}/{self.name}".encode()).digest()
        return "held_out" if int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT else "train"


def pages(folder: Path) -> list[Page]:
    """Every usable page, in a fixed order; fetched and read once, then kept in `folder`."""
    kept = folder / "pages.jsonl"
    if not kept.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        found = usable(page for key, digest in PACKAGES.items() for page in _read(_fetch(folder, *key, digest), key[0]))
        kept.write_text("".join(json.dumps(asdict(page)) + "\n" for page in found))
    return [Page(**json.loads(line)) for line in kept.read_text().splitlines()]


def usable(found: Iterable[Page]) -> list[Page]:
    """Those whose question has one answer and is not spelled out in it: no query or passage comes twice."""
    listed = sorted(set(found), key=lambda page: (page.package, page.name, page.query))
    queries = Counter(_plain(page.query) for page in listed)
    passages = Counter(_plain(page.passage) for page in listed)
    return [
        page
        for page in listed
        if queries[_plain(page.query)] == 1
        and passages[_plain(page.passage)] == 1
        and _plain(page.query) not in _plain(page.passage)
    ]


def parse(package: str, rendered: str) -> Page | None:
    """The page in groff's plain text; None when it lacks a one-line description or prose to describe it."""
    sections = _sections(rendered)
    name, dash, query = " ".join(sections.get("NAME", [])).partition(" - ")
    query = query.partition(' "')[0].strip().rstrip(".")  # what follows in Motif's pages is for an index
    passage: list[str] = []
    for paragraph in sections.get("DESCRIPTION", []):
        if len(passage) < MIN_WORDS and len(words := paragraph.split()) > 5:
            passage += words
    if not dash or not 3 <= len(query.split()) <= 30 or len(passage) < 12:
        return None
    first = name.split(",")[0].strip()
    return Page(package, first, query, " ".join(passage[:MAX_WORDS]))


def _sections(rendered: str) -> dict[str, list[str]]:
    """Heading -> its paragraphs of one line. Lines are endless, so a block of several is code or a table: left out."""
    sections: dict[str, list[str]] = {}
    heading, block = "", list[str]()
    for line in [*rendered.splitlines(), "END"]:
        if line.strip() and line[0] == " ":
            block.append(" ".join(line.replace("--", "-").split() if heading == "NAME" else line.split()))
            continue
        if len(block) == 1 or (block and heading == "NAME"):
            sections.setdefault(heading, []).extend(block)
        block = []
        heading = line.strip() or heading
    return sections


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


def _fetch(folder: Path, package: str, version: str, digest: str) -> Path:
    """The package's file. Raises SystemExit when this version cannot be had."""
    path = folder / f"{package}.deb"
    if not path.is_file():
        command = ["apt-get", "-o", "APT::Sandbox::User=root", "download", f"{package}={version}"]
        done = subprocess.run(command, cwd=folder, check=False)
        found = list(folder.glob(f"{package}_*.deb"))
        if done.returncode or len(found) != 1:
            raise SystemExit(
                f"{package} {version} could not be fetched. On Debian 12 run 'apt-get update' first; if the mirrors no "
                f"longer have this version, put its .deb at {path}"
            )
        found[0].rename(path)
    if (got := hashlib.sha256(path.read_bytes()).hexdigest()) != digest:
        raise SystemExit(f"{path}: SHA-256 is {got}, expected {digest}")
    return path


def _read(path: Path, package: str) -> list[Page]:
    with ThreadPoolExecutor() as pool:
        rendered = pool.map(_render, _sources(path))
        return [page for text in rendered if (page := parse(package, text)) is not None]


def _sources(path: Path) -> Iterator[bytes]:
    """The roff of every page in English that is not another name of one."""
    archive = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isreg() and _MAN_PATH.fullmatch(member.name) and (file := tar.extractfile(member)) is not None:
                source = gzip.decompress(file.read())
                if not source.startswith(b".so "):
                    yield source


def _render(source: bytes) -> str:
    return subprocess.run(_GROFF, input=source, capture_output=True, check=False).stdout.decode("ascii", "replace")
