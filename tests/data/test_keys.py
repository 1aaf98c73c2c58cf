"""Keys of texts: which texts count as equal."""

import pytest

from angle_llm.data.keys import is_distinctive, key, normalized, pair_key, printable


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("A man eats.", "a  man\teats", True),
        ("Isn't it 1.5?", "isn 't it 1.5 ?", True),
        ('He said "no".', "he said `` no '' .", True),
        ("ﬁne", "FINE", True),
        ("Straße", "STRASSE", True),
        ("a+b", "a b", True),
        ("# C++ or (C#)", "C++ or C#", True),
        ("1.5", "15", False),
        ("I see 🙂", "I see 🙁", False),
        ("का", "की", False),
        ("a b", "ab", False),
        ("soft\u00adware, zero\u200bwidth", "software zerowidth", True),
        ("?", "!", False),
        ("C++", "C#", False),
        ("C#", "C", False),
        ("C++17", "C 17", False),
        ("issue#12", "issue #12", True),
        ("iPhone 手机", "iPhone手机", True),
        ("你好，世界。", "你好世界", True),
        ("データベース・接続", "データベース接続", True),
        ("สวัสดี ครับ", "สวัสดีครับ", True),
        ("한국어 문장", "한국어문장", False),
        ("I ❤️ it", "I ❤ it", True),
        ("C++语言", "C++ 语言", True),
        ("C++语言", "C语言", False),
        ("辻󠄀さん", "辻さん", True),
    ],
)
def test_case_spacing_punctuation_and_forms_make_no_difference(left: str, right: str, equal: bool) -> None:
    assert (normalized(left) == normalized(right)) == equal


def test_pair_has_one_key_in_both_orders_and_parts_do_not_join() -> None:
    assert pair_key("a", "b") == pair_key("b", "a") != pair_key("a", "c")
    assert len({key("ab", "c"), key("a", "bc"), key("a", "b"), key("b", "a")}) == 4
    assert 0 <= key("a") < 2**64


@pytest.mark.parametrize(
    ("text", "telling"),
    [
        ("yes", False),
        ("a man eats", False),
        ("a man eats soup", True),
        ("一个男人在吃面条", True),
        ("Docker 容器 无法 启动", True),
        ("Да, конечно", False),
        ("Überweisung", False),
    ],
)
def test_short_texts_are_not_telling(text: str, telling: bool) -> None:
    assert is_distinctive(normalized(text)) is telling


def test_a_lone_surrogate_is_escaped() -> None:
    assert printable("a\ud800") == "a\\ud800"
