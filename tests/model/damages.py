"""The ways in which a seeded hand spoils a folder: `damage` changes one file, one value or one link of it, or two.

Nothing here judges: the process that opens what was spoiled is `open_damaged`, and what may come of it stands in `test_damage`.
"""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from folder_kinds import canary, code

from angle_llm.resumable import IDENTITY, MANIFEST

Draw = random.Random


def damage(folder: Path, draw: Draw) -> str:
    """Spoils a folder in one way, sometimes two; tells how."""
    told = [_one(folder, draw)]
    if draw.random() < 0.15:
        told.append(_one(folder, draw))
    for manifest in folder.glob(f"*/{MANIFEST}"):
        if draw.random() < 0.8:
            told.append(_signed_again(manifest))
    return "; ".join(told)


def _one(folder: Path, draw: Draw) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    if not files:
        return "nothing left to spoil"
    for _ in range(20):
        way = draw.choice(WAYS)
        told = way(folder, draw.choice(files), draw)
        if told:
            return f"{way.__name__} {told}"
    return "nothing"


def _bytes_flipped(folder: Path, path: Path, draw: Draw) -> str:
    content = bytearray(path.read_bytes())
    if not content:
        return ""
    end = min(len(content), 600) if draw.random() < 0.5 else len(content)  # headers are short
    for _ in range(draw.choice([1, 1, 8, 64])):
        content[draw.randrange(end)] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return path.name


def _cut(folder: Path, path: Path, draw: Draw) -> str:
    os.truncate(path, draw.choice([0, 1, 8, draw.randrange(path.stat().st_size + 1)]))
    return path.name


def _stutter(folder: Path, path: Path, draw: Draw) -> str:
    content = path.read_bytes()
    first = draw.randrange(len(content) + 1)
    last = draw.randrange(first, len(content) + 1)
    path.write_bytes(content[:last] + content[first:])
    return path.name


def _garbage(folder: Path, path: Path, draw: Draw) -> str:
    path.write_bytes(draw.choice([draw.randbytes(200), b"\xff\xfe", b"\xef\xbb\xbf" + path.read_bytes(), b"[]", b"null",
        b"{}", b'"x"', b"1e999", b"[" * 100_000, b'{"a":' * 100_000, "é".encode("latin-1") + path.read_bytes(),
        b"\x80\x04."]))  # fmt: skip
    return path.name


def _gone(folder: Path, path: Path, draw: Draw) -> str:
    path.unlink()
    return path.name


def _another_sort(folder: Path, path: Path, draw: Draw) -> str:
    path.unlink()
    if draw.random() < 0.5:
        path.mkdir()
        return f"{path.name} is a folder"
    os.mkfifo(path)
    return f"{path.name} is a pipe"


def _link(folder: Path, path: Path, draw: Draw) -> str:
    outside = _outside(folder)
    path.unlink()
    target = draw.choice([outside / path.name, outside / "secret.json", outside / "model.safetensors", path, "/dev/zero",
        outside, "../../outside/" + path.name])  # fmt: skip
    path.symlink_to(target)
    return f"{path.name} -> {target}"


def _swapped(folder: Path, path: Path, draw: Draw) -> str:
    other = draw.choice([file for file in sorted(folder.rglob("*")) if file.is_file()])
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)
    return f"{path.name} and {other.name}"


def _pickle(folder: Path, path: Path, draw: Draw) -> str:
    name = draw.choice(["pytorch_model.bin", "adapter_model.bin", "adapter_model.pt", "model.pt", "training_args.bin",
        "optimizer.pt", "pytorch_model.bin.index.json", path.name])  # fmt: skip
    if draw.random() < 0.5:
        for weights in folder.rglob("*.safetensors"):
            weights.unlink()
    _put(folder / name, canary(folder))
    return name


def _program(folder: Path, path: Path, draw: Draw) -> str:
    for name in ("evil.py", "__init__.py", "sitecustomize.py", "setup.py"):
        _put(folder / name, code(folder).encode())
    told = []
    for config in sorted(folder.rglob("*.json")):
        values = _json(config)
        if not isinstance(values, dict):
            continue
        ours = "evil.Evil"
        values["auto_map"] = draw.choice([
            {"AutoConfig": ours, "AutoModel": ours, "AutoTokenizer": [ours, ours]},
            {"AutoModel": f"{_outside(folder)}--{ours}"}, [ours, ours],
        ])  # fmt: skip
        values |= draw.choice([
            {}, {"trust_remote_code": True}, {"tokenizer_class": "Evil"}, {"model_type": "evil"},
            {"auto_mapping": {"base_model_class": "Evil", "parent_library": "evil"}},
            {"megatron_config": {"a": 1}, "megatron_core": "evil"}, {"custom_generate": "evil"},
            {"_attn_implementation": "somebody/kernel"}, {"attn_implementation": "somebody/kernel:evil"},
            {"quantization_config": {"quant_method": "evil"}}, {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            {"architectures": ["evil.Evil"]}, {"custom_pipelines": {"x": {"impl": "evil.Evil"}}},
        ])  # fmt: skip
        config.write_text(json.dumps(values))
        told.append(config.name)
    return f"named in {', '.join(told)}"


def _key_added(folder: Path, path: Path, draw: Draw) -> str:
    values = _json(path)
    if not isinstance(values, dict):
        return ""
    outside = _outside(folder)
    added = draw.choice([
        {"tokenizer_file": str(outside / "tokenizer.json")}, {"vocab_file": str(outside / "secret.json")},
        {"transformers_weights": "../../outside/model.safetensors"}, {"transformers_weights": str(outside / "model.safetensors")},
        {"transformers_weights": "pytorch_model.bin"}, {"_name_or_path": str(outside)}, {"name_or_path": str(outside)},
        {"fast_tokenizer_files": ["../../outside/tokenizer.json"]}, {"added_tokens_file": str(outside / "secret.json")},
        {"adapters": {"a": str(outside)}}, {"peft_type": draw.choice(["XLORA", "IA3", "PREFIX_TUNING", "lora", 3])},
        {"init_lora_weights": draw.choice(["pissa", "olora", "eva", "loftq", ["pissa"]])}, {"target_modules": "(a+)+$" * 9},
        {"exclude_modules": "(.*)*x"}, {"layers_pattern": "(a|a)*b"}, {"layers_to_transform": [10**12]}, {"bits": 4},
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, {"num_hidden_layers": 10**9},
        {"vocab_size": 10**12}, {"hidden_size": 10**9}, {"max_position_embeddings": 10**13}, {"head_dim": 10**10},
        {"num_attention_heads": 10**8}, {"rope_scaling": {"rope_type": "yarn", "factor": 1e300}}, {"base": "~root/x"},
        {"chat_template": "{% for a in range(10**9) %}{% for b in range(10**9) %}x{% endfor %}{% endfor %}"}, {"dtype": "save"},
        {"model_type": draw.choice(["t5", "clip", "mamba", "bert", "gpt2", "whisper", "llava"])},
        {"pad_token_id": 10**9},
        {"__class__": "evil"}, {"spm_file": str(outside / "secret.json")}, {"r": 10**9}, {"lora_alpha": float("inf")},
        {"max_length": draw.choice([10**12, 0, -5])}, {"pooling": "mode"}, {"is_encoder_decoder": True},
        {"tie_word_embeddings": "no"},
        {"layer_types": ["full_attention"] * 3}, {"sliding_window": -1}, {"padding": {"strategy": {"Fixed": 10**9}}},
    ])  # fmt: skip
    path.write_text(json.dumps(values | added))
    return f"{path.name} {added}"


def _value_changed(folder: Path, path: Path, draw: Draw) -> str:
    values = _json(path)
    places = list(_places(values))
    if not places:
        return ""
    holder, key = draw.choice(places)
    if draw.random() < 0.2:
        del holder[key]
        told: Any = "removed"
    else:
        outside = _outside(folder)
        tricks = ["../../outside/" + path.name, "../../outside/model.safetensors", str(outside), "~", "~/.bashrc",
            f"file://{outside}/tokenizer.json", str(outside / "secret.json"), "..", "/dev/zero"]  # fmt: skip
        plain = [None, True, False, 0, -1, 3, 2.5, 10**12, 10**30, -(10**18), 1e308, float("nan"), float("inf"), "", "x",
            "évil\x00\ud800", [], {}, [1], {"a": 1}, "y" * 100_000, _deep(500)]  # fmt: skip
        names_a_place = key in ("base", "base_model_name_or_path", "places", "name", "base_revision", "revision")
        told = draw.choice(plain if names_a_place or draw.random() < 0.7 else tricks)
        holder[key] = told
    path.write_text(json.dumps(values), encoding="utf-8", errors="surrogatepass")
    return f"{path.name} {key} {str(told)[:60]}"


def _header_changed(folder: Path, path: Path, draw: Draw) -> str:
    if path.suffix != ".safetensors" or (parts := _parts(path)) is None:
        return ""
    header, content = parts
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return ""
    name, other = draw.choice(names), draw.choice(names)
    entry = header[name]
    way = draw.choice(
        ["overlap", "beyond", "negative", "dtype", "shape", "renamed", "lost", "odd", "twice", "long", "zero"]
    )
    if way == "overlap":
        entry["data_offsets"] = header[other]["data_offsets"]
    elif way == "beyond":
        entry["data_offsets"] = draw.choice([[0, 2**62], [2**62, 2**62 + 4], [len(content), len(content) + 64]])
    elif way == "negative":
        entry["data_offsets"] = [-8, draw.choice([0, 8])]
    elif way == "dtype":
        entry["dtype"] = draw.choice(["F64", "BF16", "F16", "I8", "BOOL", "U64", "F8_E4M3", "X", None, "I32"])
    elif way == "shape":
        entry["shape"] = draw.choice(
            [[2**40, 2**40], [0], [], entry["shape"][::-1], [1, *entry["shape"]], [-1], [2**63], "x"]
        )
    elif way == "renamed":
        header[draw.choice([name + "x", "../../x", "", "__class__", "a" * 70_000])] = header.pop(name)
    elif way == "lost":
        size = entry["data_offsets"]
        header.pop(name)
        content = content[: size[0]] + content[size[1] :]
    elif way == "odd":
        entry["extra"] = _deep(200)
    elif way == "twice":
        header["__metadata__"] = draw.choice(
            [{"format": "tf"}, {"format": 3}, {}, "x", {"format": "pt", "a": "b" * 10_000}]
        )
    elif way == "zero":
        header[name] = {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}
    written = json.dumps(header).encode()
    length = draw.choice([2**60, 2**31, len(written) + 8, 1]) if way == "long" else len(written)
    path.write_bytes(length.to_bytes(8, "little") + written + content)
    return f"{path.name} {way} {name[:60]}"


def _numbers_changed(folder: Path, path: Path, draw: Draw) -> str:
    if path.suffix != ".safetensors" or (parts := _parts(path)) is None:
        return ""
    header, content = parts
    entry = header.get(draw.choice(sorted(header)), {})
    if "data_offsets" not in entry or entry.get("dtype") != "F32":
        return ""
    first, last = entry["data_offsets"]
    values = np.frombuffer(content[first:last], dtype=np.float32).copy()
    if not values.size:
        return ""
    value = draw.choice([np.nan, np.inf, -np.inf, 3e38, 0.0, 1e-45])
    values[draw.randrange(values.size) if draw.random() < 0.5 else slice(None)] = value
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + content[:first] + values.tobytes() + content[last:])
    return f"{path.name} {value}"


def _weights_elsewhere(folder: Path, path: Path, draw: Draw) -> str:
    index = folder / "model.safetensors.index.json"
    whole = folder / "model.safetensors"
    if whole.is_file() and (parts := _parts(whole)) is not None:
        whole.rename(folder / "model-00001-of-00001.safetensors")
        values: Any = {"metadata": {}, "weight_map": dict.fromkeys(parts[0], "model-00001-of-00001.safetensors")}
        values["weight_map"].pop("__metadata__", None)
    elif index.is_file() and isinstance(values := _json(index), dict) and isinstance(values.get("weight_map"), dict):
        pass
    else:
        return ""
    target = draw.choice(["../../outside/model.safetensors", str(_outside(folder) / "model.safetensors"), "nowhere.safetensors",
        "pytorch_model.bin", 7, None, "", ".", ["a"], "./../outside", "/dev/zero", "a\x00b"])  # fmt: skip
    names = list(values["weight_map"])
    for name in names if draw.random() < 0.3 else names[:1]:
        values["weight_map"][name] = target
    if draw.random() < 0.1:
        values.pop("metadata")
    _put(index, json.dumps(values).encode())
    return f"at {target!r}"


def _stray_config(folder: Path, path: Path, draw: Draw) -> str:
    outside = _outside(folder)
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    name, values = draw.choice([
        ("adapter_config.json", adapter | {"base_model_name_or_path": str(outside)}),
        ("config.json", {"model_type": "llama", "auto_map": {"AutoModel": "evil.Evil"}}),
        ("angle_llm.json", {"format_version": 1}), ("generation_config.json", {"max_length": "x"}),
        ("special_tokens_map.json", {"bos_token": {"content": "x" * 9000}, "pad_token": 3}),
        ("added_tokens.json", {"man": 10**9, " a": 399}), ("preprocessor_config.json", {"auto_map": {}}),
        ("chat_template.jinja", "{{ 1/0 }}"), ("modules.json", []),
    ])  # fmt: skip
    _put(folder / name, json.dumps(values).encode())
    return name


WAYS: tuple[Callable[[Path, Path, Draw], str], ...] = (
    _bytes_flipped, _cut, _stutter, _garbage, _gone, _another_sort, _link, _swapped, _pickle, _program,
    _key_added, _key_added, _value_changed, _value_changed, _value_changed, _value_changed,
    _header_changed, _header_changed, _numbers_changed, _weights_elsewhere, _stray_config,
)  # fmt: skip


def _outside(folder: Path) -> Path:
    return folder.parent.parent / "outside"


def _put(path: Path, content: bytes) -> None:
    """Writes a file, in the place of whatever is there: not through a link, not into a pipe."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _json(path: Path) -> Any:
    try:
        plain = path.suffix == ".json" and path.is_file() and not path.is_symlink()  # a pipe would be waited for
        return json.loads(path.read_text(encoding="utf-8")) if plain else None
    except (ValueError, OSError, RecursionError):
        return None


def _places(values: Any, depth: int = 0) -> Any:
    """Every (holder, key) of a JSON value; of long lists and mappings the first twenty."""
    items = (
        list(values.items())
        if isinstance(values, dict)
        else list(enumerate(values))
        if isinstance(values, list)
        else []
    )
    for key, value in items[:20]:
        yield values, key
        if depth < 6:
            yield from _places(value, depth + 1)


def _deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = {"a": value} if level % 2 else [value]
    return value


def _parts(path: Path) -> tuple[dict[str, Any], bytes] | None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, OverflowError):
        return None
    return (header, content[8 + length :]) if isinstance(header, dict) else None


def _signed_again(manifest: Path) -> str:
    """Sizes and hashes as a hand that knows how would write them: a manifest is no seal."""
    body = _json(manifest) if manifest.is_file() and not manifest.is_symlink() else None
    identity = _json(manifest.parent.parent / IDENTITY)
    if not isinstance(body, dict):
        return "not signed"
    files = body.get("files")
    for entry in files if isinstance(files, list) else ():
        path = manifest.parent / str(entry.get("name") if isinstance(entry, dict) else "")
        with_content = isinstance(entry, dict) and "\x00" not in str(path) and path.is_file() and not path.is_symlink()
        if with_content and path.parent == manifest.parent:
            content = path.read_bytes()
            entry |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    try:
        signed = {key: body.get(key) for key in ("name", "values", "files")}
        digest = hashlib.sha256(json.dumps([identity, signed], sort_keys=True).encode()).hexdigest()
        manifest.write_bytes(json.dumps({**body, "sha256": digest}, indent=1).encode())
    except (ValueError, RecursionError):
        return "not signed"
    return "signed again"
