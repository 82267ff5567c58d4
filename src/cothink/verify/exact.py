"""Matchers that need no algebra: exact rationals, option letters and normalised text. Bounded, in-process."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from cothink.verify.extract import peel, trailing_maths

MAX_NUMBER = 200
"""Longest text read as one number; `int()` on more digits is neither an answer nor cheap."""

Choices = Mapping[str, str] | Sequence[str]

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_PLAIN = re.compile(rf"([-+]?)\s?({_DIGITS})(?:\s?/\s?({_DIGITS}))?\.?")
_FRAC = re.compile(r"([-+]?)\s?\\[dt]?frac\s?\{\s?([0-9]+)\s?\}\s?\{\s?([0-9]+)\s?\}")
_ANY = re.compile(rf"(?<![\w.])([-+]?)((?:{_DIGITS})(?:/[0-9]+)?)")
_WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}")
_NOISE = re.compile(r"\\[$%]|[$%€£°]|\\!|\\,|\\;|\^\s?\{?\s?\\circ\s?\}?|\\degree|[*~`]")
_WORD = re.compile(r"[A-Za-z]+(?:/[A-Za-z]+)?")
# Words that change a number's value: text that holds one of them is more than a number with a unit.
_NOT_UNITS = frozenset(
    """pi sqrt root squared cubed sin cos tan log ln exp hundred thousand million billion trillion dozen half third
    quarter minus negative plus times over factorial not no or than least most""".split()  # noqa: SIM905
)

_LEAD = r"(?:the\s)?(?:(?:correct|right|best)\s)?(?:(?:answer|option|choice)(?:\sis)?:?\s?)?"
_LETTER = re.compile(_LEAD + r"[(\[{]?([A-Za-z])[)\]}]?(?![A-Za-z0-9'])", re.IGNORECASE)
_TWO_LETTERS = re.compile(r"\s?(?:or|OR|and|AND|/|&|,)\s?[(\[{]?[A-H][)\]}]?(?![A-Za-z'])")
_LETTER_IN_PROSE = re.compile(r"\(([A-Z])\)|(?:answer|option|choice)(?:\sis)?:?\s(?:option\s)?\(?([A-Z])(?![A-Za-z'])")
_BASED = re.compile(r"\(?([0-9A-Za-z]{1,64})\)?_\{?(?:\\text\{)?([0-9]{1,2})\}{0,2}")
_THIN = re.compile(r"\\!")
_FACTORIAL = re.compile(r"(?<![\w.)}!])([0-9]|1[0-9]|20)!(?![!=])")
_BANG = re.compile(r"!(?!=)")
_RELATION = re.compile(
    r"\\(?:neq?|not|neg|lnot|geq?|geqslant|gt|leq?|leqslant|lt|in|equiv|implies)(?![A-Za-z])|!=|[<>≤≥≠¬∈]"
)
_DOTS = re.compile(r"\\(?:[lc]?dots|dotsc)(?![A-Za-z])|…|\.{3}")
_SPACES = re.compile(r"\s+|\\(?:left|right)(?![A-Za-z])|\\[!,;: ]")


def plain_number(text: str) -> Fraction | None:
    r"""The rational that `text` writes and nothing else (`-3`, `1,000`, `18.0`, `1/2`, `\frac{1}{2}`, `$5`, `50\%`)."""
    if len(text) > MAX_NUMBER:
        return None
    text = _NOISE.sub("", _unwrap(text).replace("−", "-").replace("{,}", ",")).strip()
    if match := _FRAC.fullmatch(text):
        top, bottom = int(match[2]), int(match[3])
    elif match := _PLAIN.fullmatch(text):
        top, bottom = _rational(match[2]), _rational(match[3] or "1")
    else:
        return None
    if not bottom:
        return None
    return Fraction(top) / bottom * (-1 if match[1] == "-" else 1)


def number(text: str) -> Fraction | None:
    """As `plain_number`, also after the last `=` and with units or words around a single number."""
    if len(text) > MAX_NUMBER:
        return None
    for part in (text, text.rpartition("=")[2]):
        if (value := plain_number(part)) is not None:
            return value
    text = _NOISE.sub(" ", _unwrap(text.rpartition("=")[2]).replace("−", "-").replace("{,}", ","))
    found = list(_ANY.finditer(text)) or list(re.finditer(rf"()({_DIGITS})", text))
    if len(found) != 1:
        return None
    rest = text[: found[0].start()] + " " + text[found[0].end() :]
    words = _WORD.findall(rest.lower())
    # `5cm` is five with a unit, `2x` and `2^3` are no numbers.
    strange = _WORD.sub("", rest).strip(" \t\n.,;:!?'\"()")
    if strange or any(word in _NOT_UNITS or (len(word) < 2 and word != "a") for word in words):
        return None
    return plain_number(found[0].group())


def factorials(text: str) -> str | None:
    r"""`text` with `5!` worked out; None where another factorial is left (`n!`, `(a+b)!`, `99!`)."""
    text = _THIN.sub("", text)
    done = _FACTORIAL.sub(lambda found: str(math.factorial(int(found[1]))), text)
    return None if _BANG.search(done) else done


def based(text: str) -> int | None:
    """The value of a number that is written in a base (`101_2` is 5); None for anything else."""
    found = _BASED.fullmatch(peel(_SPACES.sub("", text)))
    try:
        return int(found[1], int(found[2])) if found else None
    except ValueError:  # `x_1`, or digits that the base does not have
        return None


def adds(gold: str, answer: str) -> bool:
    r"""Whether an answer holds what algebra drops in silence, and the gold nothing of the kind.

    A relation with nothing on its left (`\ne 5`), dots (`0.3...`), a word that changes the value (`5\text{ squared}`).
    """
    if _RELATION.match(answer.lstrip("$ ")) and not _RELATION.search(gold):
        return True
    if _DOTS.search(answer) and not _DOTS.search(gold):
        return True
    words = [word for text in _WRAPPED.findall(answer) for word in _WORD.findall(text.lower())]
    return any(word in _NOT_UNITS - {"or", *_WORD.findall(gold.lower())} for word in words)


def last_number(text: str) -> str | None:
    """The last number or trailing `$...$` of a prose text, whichever ends later."""
    numbers = list(_ANY.finditer(text))
    found = numbers[-1] if numbers else None
    maths = trailing_maths(text)
    if maths and (found is None or maths[1] >= found.end()):
        return peel(maths[0])
    return found.group() if found else None


def show(value: Fraction) -> str:
    """`3`, `-1/2`: the canonical spelling of a rational."""
    return str(value)


def letter(text: str, choices: Choices | None = None) -> str | None:
    """The option letter that an answer states, upper case, or None when it states none or several.

    A letter may stand bare, in brackets or before text. The text of exactly one choice stands for its letter.
    """
    options = lettered(choices)
    text = peel(_unwrap(text))[:1000]
    said = fold(text)
    named = [key for key, choice in options.items() if said and fold(choice) == said]
    if named:
        return named[0] if len(named) == 1 else None
    match = _LETTER.match(text)
    if not match or _TWO_LETTERS.match(text, match.end()):
        return None
    found, rest = match[1].upper(), text[match.end() :]
    if options and found not in options:
        return None
    if not text[match.end() - 1].isalpha() or not rest[:1].isspace() or not (words := fold(rest).split()):
        return found
    # A bare letter before words: "D mall", but "a bank" is an article unless that is the text of choice A.
    if match[1] in "BCDEFGH" or words[0] in ("because", "since", "is") or words == fold(options.get(found, "")).split():
        return found
    return None


def letter_in_prose(text: str, choices: Choices | None = None) -> str | None:
    """The last option letter that prose names, as `(C)` or `the answer is C`."""
    options = lettered(choices)
    found = [m[1] or m[2] for m in _LETTER_IN_PROSE.finditer(text)]
    found = [key for key in found if not options or key in options]
    return found[-1] if found else None


def lettered(choices: Choices | None) -> dict[str, str]:
    """Choices by upper-case letter; a bare list is lettered from A."""
    if not choices:
        return {}
    if isinstance(choices, Mapping):
        return {str(key).upper(): str(value) for key, value in choices.items()}
    return {chr(65 + i): str(value) for i, value in enumerate(choices)}


def fold(text: str) -> str:
    """Text for comparison: case, white space, quotes, emphasis, `\\text{}` and closing punctuation do not count."""
    text = peel(_unwrap(text[:4000])).strip(" \t\n\"'*_`.,;:!?").casefold()
    return " ".join(text.split())


def same_spelling(gold: str, answer: str) -> bool:
    r"""Whether two mathematical answers are written alike up to spacing, `\left`, `\dfrac`, `\text` and `$`."""
    return _spelling(gold) == _spelling(answer)


def same_option(gold: str, answer: str) -> bool:
    r"""Whether the gold is one option letter, as in `\\text{(C)}`, and the answer names it, perhaps before its text."""
    wanted = _spelling(gold)
    return re.fullmatch("[A-H]", wanted) is not None and letter(answer) == wanted


def _spelling(text: str) -> str:
    text = peel(_unwrap(text))
    if re.fullmatch(r"\(?[A-Za-z][a-zA-Z ]+\)?", text):  # words: case does not count
        text = text.casefold()
    text = _SPACES.sub("", text).replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac").replace("{,}", ",")
    option = re.fullmatch(r"\(([A-Z])\)", text)
    return option[1] if option else text.strip("$")


def _unwrap(text: str) -> str:
    return _WRAPPED.sub(r"\1", text)


def _rational(digits: str) -> Fraction:
    whole, _, decimals = digits.replace(",", "").partition(".")
    return Fraction(int(whole + decimals), 10 ** len(decimals))
