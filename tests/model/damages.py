"""Random damage to a model or vector folder: one file, JSON value, tensor header or link is changed, sometimes two.

`open_damaged` opens the damaged folders, `test_damage` checks the outcomes.
"""

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from angle_llm.resumable import IDENTITY, MANIFEST

Draw = random.Random
MARKER = "MARKER"
"""A file that code in a folder would make, in the folder's grandparent."""
CONFIG_VALUES: list[dict[str, Any]] = [
    {"tokenizer_file": "OUTSIDE/tokenizer.json"}, {"vocab_file": "OUTSIDE/secret.json"}, {"_name_or_path": "OUTSIDE"},
    {"transformers_weights": "../../outside/model.safetensors"}, {"transformers_weights": "pytorch_model.bin"},
    {"fast_tokenizer_files": ["../../outside/tokenizer.json"]}, {"added_tokens_file": "OUTSIDE/secret.json"},
    {"adapters": {"a": "OUTSIDE"}}, {"peft_type": "XLORA"}, {"peft_type": 3}, {"init_lora_weights": "pissa"},
    {"target_modules": "(a+)+$" * 9}, {"exclude_modules": "(.*)*x"}, {"layers_pattern": "(a|a)*b"},
    {"layers_to_transform": [10**12]}, {"r": 10**9}, {"lora_alpha": float("inf")}, {"bits": 4}, {"base": "~root/x"},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, {"dtype": "save"},
    {"num_hidden_layers": 10**9}, {"vocab_size": 10**12}, {"hidden_size": 10**9}, {"max_position_embeddings": 10**13},
    {"head_dim": 10**10}, {"num_attention_heads": 10**8}, {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}},
    {"chat_template": "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"},
    {"model_type": "t5"}, {"model_type": "mamba"}, {"model_type": "llava"}, {"pad_token_id": 10**9}, {"pooling": "mode"},
    {"max_length": 10**12}, {"max_length": -5}, {"is_encoder_decoder": True}, {"tie_word_embeddings": "no"},
    {"layer_types": ["full_attention"] * 3}, {"sliding_window": -1}, {"padding": {"strategy": {"Fixed": 10**9}}},
]  # fmt: skip
CODE_VALUES: list[dict[str, Any]] = [
    {}, {"trust_remote_code": True}, {"tokenizer_class": "Evil"}, {"model_type": "evil"},
    {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}}, {"megatron_core": "evil"},
    {"custom_generate": "evil"}, {"_attn_implementation": "user/kernel"}, {"attn_implementation": "user/kernel:evil"},
    {"quantization_config": {"quant_method": "evil"}}, {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"architectures": ["evil.Evil"]}, {"custom_pipelines": {"x": {"impl": "evil.Evil"}}},
]  # fmt: skip
STRAY_FILES: list[tuple[str, Any]] = [
    ("adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}),
    ("config.json", {"model_type": "llama", "auto_map": {"AutoModel": "evil.Evil"}}), ("modules.json", []),
    ("angle_llm.json", {"format_version": 1}), ("generation_config.json", {"max_length": "x"}),
    ("special_tokens_map.json", {"bos_token": {"content": "x" * 9000}, "pad_token": 3}),
    ("added_tokens.json", {"man": 10**9, " a": 399}), ("chat_template.jinja", "{{ 1/0 }}"),
]  # fmt: skip
CONTENTS = [b"", b"\xff\xfe", b"[]", b"null", b"{}", b'"x"', b"1e999", b"[" * 100_000, b'{"a":' * 100_000, b"\x80\x04."]
ODD_VALUES: list[Any] = [
    None, True, 0, -1, 3, 2.5, 10**12, 10**30, 1e308, float("nan"), "", "x", "évil\x00\ud800", [], {}, [1], {"a": 1},
    "y" * 100_000, [[[[[[1]]]]]], "../../outside/model.safetensors", "OUTSIDE", "~/.bashrc", "..", "/dev/zero",
    "file://OUTSIDE/tokenizer.json",
]  # fmt: skip
PATHS = ["../../outside/model.safetensors", "OUTSIDE/model.safetensors", "nowhere.safetensors", "pytorch_model.bin", 7,
    None, "", ".", ["a"], "/dev/zero", "a\x00b"]  # fmt: skip
HEADER_VALUES: list[dict[str, Any]] = [
    {"data_offsets": [0, 2**62]}, {"data_offsets": [2**62, 2**62 + 4]}, {"data_offsets": [-8, 8]}, {"data_offsets": [0, 8]},
    {"dtype": "F64"}, {"dtype": "BF16"}, {"dtype": "I8"}, {"dtype": "F8_E4M3"}, {"dtype": None}, {"shape": [2**40, 2**40]},
    {"shape": [0]}, {"shape": []}, {"shape": [-1]}, {"shape": [2**63]}, {"shape": "x"}, {"extra": [[[1]]]},
]  # fmt: skip


def damage(folder: Path, draw: Draw) -> str:
    """Damage a folder and return a description."""
    done = [_one(folder, draw) for _ in range(2 if draw.random() < 0.15 else 1)]
    for manifest in folder.glob(f"*/{MANIFEST}"):
        if draw.random() < 0.8:
            done.append(_signed_again(manifest))
    return "; ".join(done)


def _one(folder: Path, draw: Draw) -> str:
    for _ in range(20):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        path, change = draw.choice(files), draw.choice(DAMAGES)
        if change(folder, path, draw) is not False:
            return f"{change.__name__} {path.name}"
    return "nothing"


def flip_bits(folder: Path, path: Path, draw: Draw) -> object:
    content = bytearray(path.read_bytes() or b"x")
    end = min(len(content), 600) if draw.random() < 0.5 else len(content)  # headers are short
    for _ in range(draw.choice([1, 1, 8, 64])):
        content[draw.randrange(end)] ^= 1 << draw.randrange(8)
    return path.write_bytes(content)


def truncate(folder: Path, path: Path, draw: Draw) -> object:
    return os.truncate(path, draw.choice([0, 1, 8, draw.randrange(path.stat().st_size + 1)]))


def replace_content(folder: Path, path: Path, draw: Draw) -> object:
    return path.write_bytes(draw.choice([*CONTENTS, draw.randbytes(200), b"\xef\xbb\xbf" + path.read_bytes()]))


def swap_files(folder: Path, path: Path, draw: Draw) -> object:
    other = draw.choice([file for file in sorted(folder.rglob("*")) if file.is_file()])
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    return other.write_bytes(first)


def replace_file(folder: Path, path: Path, draw: Draw) -> object:
    """Nothing, a folder, a pipe, or a link out of the folder."""
    path.unlink()
    outside = _outside(folder)
    links = [outside / path.name, outside / "secret.json", outside / "model.safetensors", path, "/dev/zero", outside]
    return draw.choice(
        [lambda: None, path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to(draw.choice(links))]
    )()


def add_pickle(folder: Path, path: Path, draw: Draw) -> object:
    if draw.random() < 0.5:
        for weights in folder.rglob("*.safetensors"):
            weights.unlink()
    names = ["pytorch_model.bin", "adapter_model.bin", "adapter_model.pt", "training_args.bin", path.name]
    return _put(folder / draw.choice(names), canary(folder))


def add_code(folder: Path, path: Path, draw: Draw) -> object:
    for name in ("evil.py", "__init__.py", "sitecustomize.py"):
        _put(folder / name, code(folder).encode())
    names = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    for config in sorted(folder.rglob("*.json")):
        if isinstance(values := _json(config), dict):
            remote = {"AutoModel": f"{_outside(folder)}--evil.Evil"}
            values |= {"auto_map": draw.choice([names, remote])} | draw.choice(CODE_VALUES)
            config.write_text(json.dumps(values))
    return None


def add_value(folder: Path, path: Path, draw: Draw) -> object:
    if not isinstance(values := _json(path), dict):
        return False
    return path.write_text(_dump(folder, values | draw.choice(CONFIG_VALUES)))


def change_value(folder: Path, path: Path, draw: Draw) -> object:
    values = _json(path)
    if not (places := list(_places(values))):
        return False
    holder, key = draw.choice(places)
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(ODD_VALUES)
    return path.write_text(_dump(folder, values), encoding="utf-8", errors="surrogatepass")


def change_header(folder: Path, path: Path, draw: Draw) -> object:
    if (parts := _tensors(path)) is None:
        return False
    header, content = parts
    name = draw.choice(sorted(header))
    if draw.random() < 0.6 and isinstance(header[name], dict):
        header[name] |= draw.choice([*HEADER_VALUES, {"data_offsets": header[draw.choice(sorted(header))]}])
    elif draw.random() < 0.5:
        header[draw.choice([name + "x", "../../x", "", "a" * 70_000])] = header.pop(name)
    else:
        header["__metadata__"] = draw.choice([{"format": "tf"}, {"format": 3}, {}, "x"])
    written = json.dumps(header).encode()
    length = draw.choice([2**60, 2**31, len(written) + 8, 1, *[len(written)] * 12])
    return path.write_bytes(length.to_bytes(8, "little") + written + content)


def change_numbers(folder: Path, path: Path, draw: Draw) -> object:
    header, content = _tensors(path) or ({}, b"")
    entry = header.get(draw.choice(sorted(header) or [""]), {})
    if entry.get("dtype") != "F32":
        return False
    first, last = entry["data_offsets"]
    values = np.frombuffer(content[first:last], dtype=np.float32).copy()
    value = draw.choice([np.nan, np.inf, -np.inf, 0.0, 1e-45])
    values[draw.randrange(values.size) if draw.random() < 0.5 else slice(None)] = value
    start = len(path.read_bytes()) - len(content)
    return path.write_bytes(path.read_bytes()[:start] + content[:first] + values.tobytes() + content[last:])


def move_weights(folder: Path, path: Path, draw: Draw) -> object:
    """Shards of an index that names other files."""
    whole = folder / "model.safetensors"
    if not whole.is_file() or (parts := _tensors(whole)) is None:
        return False
    whole.rename(folder / "model-00001-of-00001.safetensors")
    weight_map = {name: "model-00001-of-00001.safetensors" for name in parts[0] if name != "__metadata__"}
    for name in list(weight_map)[: draw.choice([0, 1, 1000])]:
        weight_map[name] = draw.choice(PATHS)
    index = {"metadata": {}, "weight_map": weight_map}
    return _put(folder / "model.safetensors.index.json", _dump(folder, index).encode())


def add_stray_file(folder: Path, path: Path, draw: Draw) -> object:
    name, values = draw.choice(STRAY_FILES)
    return _put(folder / name, json.dumps(values).encode())


DAMAGES: tuple[Callable[[Path, Path, Draw], object], ...] = (
    flip_bits, truncate, replace_content, swap_files, replace_file, replace_file, replace_file, add_pickle, add_code,
    add_value, add_value, change_value, change_value, change_value, change_header, change_header, change_numbers,
    move_weights, add_stray_file,
)  # fmt: skip


class _Explosive:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def canary(folder: Path) -> bytes:
    """A pickle that makes the marker when it is loaded."""
    return pickle.dumps(_Explosive(folder.parent.parent / MARKER))


def code(folder: Path) -> str:
    """A module that makes the marker when it is run."""
    return f"open({str(folder.parent.parent / MARKER)!r}, 'w')\nclass Evil: pass\n"


def _outside(folder: Path) -> Path:
    return folder.parent.parent / "outside"


def _dump(folder: Path, values: Any) -> str:
    return json.dumps(values).replace("OUTSIDE", str(_outside(folder)))


def _put(path: Path, content: bytes) -> None:
    """Replace whatever is at the path; do not write through a link or into a pipe."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _json(path: Path) -> Any:
    try:
        plain = path.suffix == ".json" and path.is_file() and not path.is_symlink()  # a pipe would block
        return json.loads(path.read_text(encoding="utf-8")) if plain else None
    except (ValueError, OSError, RecursionError):
        return None


def _places(values: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) of a JSON value; the first twenty of a list or object."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in list(items)[:20]:
        yield values, key
        if depth < 6:
            yield from _places(value, depth + 1)


def _tensors(path: Path) -> tuple[dict[str, Any], bytes] | None:
    """Header and content of a safetensors file."""
    content = path.read_bytes() if path.suffix == ".safetensors" else b""
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, OverflowError):
        return None
    return (header, content[8 + length :]) if isinstance(header, dict) and header else None


def _signed_again(manifest: Path) -> str:
    """Correct the sizes and hashes of a manifest, as an attacker can."""
    body, identity = _json(manifest), _json(manifest.parent.parent / IDENTITY)
    if not isinstance(body, dict):
        return "not signed"
    for entry in body["files"] if isinstance(body.get("files"), list) else ():
        name = entry.get("name") if isinstance(entry, dict) else None
        if isinstance(name, str) and any(path.name == name and path.is_file() for path in manifest.parent.iterdir()):
            content = (manifest.parent / name).read_bytes()
            entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    signed = {key: body.get(key) for key in ("name", "values", "files")}
    digest = hashlib.sha256(json.dumps([identity, signed], sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({**body, "sha256": digest}, indent=1))
    return "signed again"
