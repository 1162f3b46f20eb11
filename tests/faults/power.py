"""What is on the disk after a power cut, by the log of a process's system calls that shim.c has recorded."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Tree = dict[str, bytes | None]  # {relative path: content, or None for a directory}


@dataclass
class Node:
    """A file or a directory: as programs see it, and as it was when it was last flushed."""

    now: bytearray | dict
    disk: bytes | dict

    def tree(self, names: str, path: str = "") -> Tree:
        """What lies under it: its `names` of now or of the disk, but the files' content of the disk."""
        if isinstance(self.now, bytearray):
            return {path: self.disk}
        inside = [child.tree(names, f"{path}/{name}".lstrip("/")) for name, child in getattr(self, names).items()]
        return ({path: None} if path else {}) | {k: v for tree in inside for k, v in tree.items()}


def replay(log: Path, root: Path) -> Iterator[tuple[str, str, list[Tree]]]:
    """After each call: the call, the path it named last, and what is under `root` if the power is cut then. A file has
    what was flushed; names that were made, changed or deleted since their directory was flushed are lost in the first
    tree, and there in the second."""
    top, made = Node({}, {}), {}  # {inode: the name with which it was made}

    def parent(path: str) -> tuple[dict, str]:
        node, (*directories, name) = top, Path(path).relative_to(root).parts
        for directory in directories:
            node = node.now[directory]
        return node.now, name

    with log.open("rb") as file:
        while line := file.readline():
            call, path, target, inode, offset, size = line.decode().rstrip("\n").split("\t")
            offset, data = int(offset), file.read(int(size))
            if call == "fsync" and path == str(root):
                top.disk = dict(top.now)
            elif call in ("mkdir", "open"):
                names, name = parent(path)
                node = names.setdefault(name, Node({}, {}) if call == "mkdir" else Node(bytearray(), b""))
                if call == "open":
                    made[inode] = name
                    if offset:  # O_TRUNC
                        node.now.clear()
            elif call == "rename":
                (names, name), (others, other) = parent(path), parent(target)
                others[other] = names.pop(name)
            elif call == "unlink":
                names, name = parent(path)
                del names[name]
            else:
                names, name = parent(path)
                if name not in names:  # safetensors has renamed its temporary file by a call that is not recorded
                    names[name] = names.pop(made[inode])
                now = names[name].now
                if call == "write":
                    now[offset : offset + len(data)] = data
                elif call == "truncate":
                    now[:] = now[:offset].ljust(offset, b"\0")
                elif call == "fsync":
                    names[name].disk = bytes(now) if isinstance(now, bytearray) else dict(now)
            yield call, target or path, [top.tree("disk"), top.tree("now")]


def write(tree: Tree, directory: Path) -> None:
    """Lays a tree out in a new directory."""
    directory.mkdir()
    for name, content in tree.items():
        if content is None:
            (directory / name).mkdir()
        else:
            (directory / name).write_bytes(content)
