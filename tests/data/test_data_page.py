"""What docs/data.md shows can be read."""

import re
from pathlib import Path

import yaml

from angle_llm.config import DataSettings, TrainSettings, settings_from_dict
from angle_llm.data.mixture import sets_of

PAGE = (Path(__file__).parent.parent.parent / "docs" / "data.md").read_text(encoding="utf-8")


def test_the_list_and_the_yaml_file_of_the_page() -> None:
    (listed,) = re.findall(r"--data\.path (\S+)", PAGE)
    assert [(each.path, each.weight) for each in sets_of(DataSettings(path=listed))] == [
        ("stsb@train", 2.0),
        ("nli@train", 1.0),
        ("my.jsonl", 1.0),
    ]
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    settings = settings_from_dict(TrainSettings, yaml.safe_load(block), where="docs/data.md")
    assert [each.path for each in sets_of(settings.data)] == ["stsb@train", "nli@train", "my.jsonl"]
    assert settings.data.sets[0].objective == {"cosine_weight": 1, "in_batch_weight": 0}
