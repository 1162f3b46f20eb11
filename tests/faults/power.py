"""What is on the disk after a power cut, from the log of a process's system calls recorded by shim.c."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Tree = dict[str, bytes | None]  # {relative path: content, or None for a directory}


@dataclass
class Node:
    """A file or a directory: as programs see it (`cached`), and as it was last flushed (`disk`)."""

    cached: bytearray | dict
    disk: bytes | dict

    def tree(self, names: str, path: str = "") -> Tree:
        """The tree below it: directories' entries from `names` ("cached" or "disk"), files' content from the disk."""
        if isinstance(self.cached, bytearray):
            return {path: self.disk}
        subtrees = [child.tree(names, f"{path}/{name}".lstrip("/")) for name, child in getattr(self, names).items()]
        return ({path: None} if path else {}) | {k: v for tree in subtrees for k, v in tree.items()}


def replay(log: Path, root: Path) -> Iterator[tuple[str, str, list[Tree]]]:
    """After each call: the call, its last path, and the tree under `root` if the power is cut then. Files have their
    flushed content. Names that were created, changed or deleted since their directory was flushed are as flushed in the
    first tree, and as programs saw them in the second."""
    top, first_names = Node({}, {}), {}  # {inode: the name with which it was created}

    def parent(path: str) -> tuple[dict, str]:
        node, (*directories, name) = top, Path(path).relative_to(root).parts
        for directory in directories:
            node = node.cached[directory]
        return node.cached, name

    with log.open("rb") as file:
        while line := file.readline():
            call, path, target, inode, offset, size = line.decode().rstrip("\n").split("\t")
            offset, data = int(offset), file.read(int(size))
            if call == "fsync" and path == str(root):
                top.disk = dict(top.cached)
            elif call in ("mkdir", "open"):
                names, name = parent(path)
                node = names.setdefault(name, Node({}, {}) if call == "mkdir" else Node(bytearray(), b""))
                if call == "open":
                    first_names[inode] = name
                    if offset:  # O_TRUNC
                        node.cached.clear()
            elif call == "rename":
                (names, name), (target_names, target_name) = parent(path), parent(target)
                target_names[target_name] = names.pop(name)
            elif call == "unlink":
                names, name = parent(path)
                del names[name]
            else:
                names, name = parent(path)
                if name not in names:  # safetensors renames its temporary file by a call that is not recorded
                    names[name] = names.pop(first_names[inode])
                cached = names[name].cached
                if call == "write":
                    cached[offset : offset + len(data)] = data
                elif call == "truncate":
                    cached[:] = cached[:offset].ljust(offset, b"\0")
                elif call == "fsync":
                    names[name].disk = bytes(cached) if isinstance(cached, bytearray) else dict(cached)
            yield call, target or path, [top.tree("disk"), top.tree("cached")]


def write(tree: Tree, directory: Path) -> None:
    """Writes a tree into a new directory."""
    directory.mkdir()
    for name, content in tree.items():
        if content is None:
            (directory / name).mkdir()
        else:
            (directory / name).write_bytes(content)
