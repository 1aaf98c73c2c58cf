"""Built-in texts for the comparison of two forms of an encoder: short, long and unusual texts.

They contain what forms can treat differently: quotes and full stops that can merge with the prompt, braces of templates,
names of special tokens, other scripts, and more tokens than the maximum length.
"""

_WALK = (
    "We left the village before sunrise, crossed the bridge by the mill, and followed the river upstream until the path "
    "turned into the forest, where the snow of the last winter still lay between the roots. "
)
_MINUTES = "Item {}: the board heard the report, asked two questions about the budget, and postponed its decision. "

SENTENCES: tuple[str, ...] = (
    # plain, of several lengths, some close in meaning
    "A man is eating.",
    "Someone eats.",
    "Nobody is eating anything.",
    "A woman plays the violin on a crowded street.",
    "Two dogs run through shallow water towards the camera.",
    "The committee rejected the proposal because it arrived after the deadline.",
    "Interest rates rose by a quarter of a point, less than most analysts had expected.",
    "The bridge that the engineers who were dismissed last year had designed collapsed.",
    "Where is the nearest railway station?",
    "Close the window!",
    "I did not say that she stole the money.",
    "It rains",
    # one word, one character
    "Photosynthesis",
    "hello",
    "no",
    "7",
    "?",
    ".",
    # quotes, braces, parts of prompts
    'She said "no" and left.',
    '"',
    "The sign read 'Closed until further notice'.",
    '"Why?" he asked, "and why now?"',
    "Use {text} and {0} as they are: {{not}} a format.",
    "%s of %d, $HOME, \\n and \\u0041 stay what they are.",
    'Summarize sentence "the rest" in one word:"',
    "</s> <s> [CLS] [SEP] <|im_end|> <|endoftext|> are characters of this text.",
    "def f(x): return {'a': [x, x**2], \"b\": None}  # code",
    "https://example.org/a/b?c=1&d=%20#e",
    # spaces, lines, numbers, signs
    "  two  spaces   around and   within  ",
    "A first line.\nA second line.\n\n\tAn indented one.",
    "In 2019 the ratio was 3.14159:1, i.e. 1,234,567.89 € ± 0.5 %.",
    "No full stop at the end, and three dots...",
    # other scripts
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Où est passé l'été ? Il faisait si beau, naguère.",
    "Мужчина ест яблоко на скамейке в парке.",
    "一个男人正在公园里吃苹果。",
    "公園でりんごを食べている男の人がいます。",
    "رجل يأكل تفاحة في الحديقة.",
    "एक आदमी पार्क में सेब खा रहा है।",
    "Ο άνδρας τρώει ένα μήλο.",
    # emoji, joined and combined characters
    "Great news 🎉🎉 see you tomorrow 👩‍👩‍👧‍👦!",
    "naïve café, decomposed: cafe\u0301",
    # long, longer than most lengths, longer than any
    (_WALK * 3).strip(),
    "".join(_MINUTES.format(number) for number in range(1, 41)).strip(),
    (_WALK * 30).strip() + ' And then he said "stop".',
    "supercalifragilistic" * 60,
)
