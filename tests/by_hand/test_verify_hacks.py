"""Wrong answers that a checker must not take, and right ones it must: the known faults of checkers, both ways round."""

from __future__ import annotations

import pytest

from cothink.verify import verify

# Each pair is two answers that are not the same: neither may pass as an answer to the other.
DIFFERENT = {
    "percent": [
        ("50", r"0.5\%"),
        ("0.5", r"5\%"),
        (r"12\%", "1.2"),
        (r"25\%", "2.5"),
        ("1", r"10\%"),
        (r"\frac{1}{4}", r"2.5\%"),
        ("100", r"1000\%"),
        ("4", r"40\%"),
        (r"33\%", r"\frac{1}{3}"),
        ("0.07", r"70\%"),
    ],
    "set against a single value": [
        ("3", r"\{3, 4\}"),
        (r"\{1,2\}", "1"),
        ("1, 2", "1"),
        ("1,2,3", "1,2"),
        (r"\{1,2\}", r"\{1,3\}"),
        (r"\pm 2", "2"),
        (r"x=1 \text{ or } x=2", "1"),
        (r"\{0\}", r"\{0,1\}"),
        ("2, -2", "2"),
        (r"1\pm\sqrt2", r"1+\sqrt2"),
        ("5", "4, 5"),
        ("7", "1, 2, 3, 4, 5, 6, 7, 8, 9"),
        (r"\emptyset", "0"),
        (r"\{2\}", r"\{-2, 2\}"),
    ],
    "interval against tuple and other brackets": [
        ("(1,2)", "[1,2]"),
        ("[1,2)", "(1,2]"),
        ("[0,1]", r"\{0,1\}"),
        (r"(-\infty, 3)", r"(-\infty, 3]"),
        ("(1,2)", "(2,1)"),
        ("(1,2,3)", "(3,2,1)"),
        ("[1,3]", "[1,2]"),
        (r"(0,\infty)", r"[0,\infty)"),
        (r"(0,1)\cup(2,3)", "(0,1)"),
        (r"(0,1)\cup(2,3)", "(0,3)"),
        (r"[2,5]", r"(2,5)"),
    ],
    "powers and products read as numbers": [
        ("8", "2^2"),
        ("23", "2^3"),
        ("2^{10}", "210"),
        ("2^{10}", "20"),
        ("10^5", "105"),
        ("10^{-2}", "10"),
        ("6", "2^3"),
        ("2x", "2"),
        ("x^2", "x"),
        ("12", r"1\cdot2"),
        (r"3\sqrt{2}", "32"),
        (r"\sqrt{16}", "16"),
        ("5!", "5"),
        ("n!", "n"),
        (r"\frac{7!}{2}", r"\frac{7}{2}"),
        ("e^2", "2"),
        (r"2\pi", "2"),
        (r"\pi", "3.14"),
        (r"10^{10}", "1010"),
        (r"3^{x+1}", "3^x+1"),
        (r"2^{3x}", "2^3x"),
    ],
    "fractions and decimals": [
        ("0.333", r"\frac{1}{3}"),
        (r"\frac{2}{3}", "0.67"),
        ("1/2", "2"),
        ("1.5", r"1\frac{1}{3}"),
        (r"1\frac{1}{2}", r"\frac{1}{2}"),
        (r"3\frac{1}{4}", r"\frac{31}{4}"),
        ("0.1", "0.01"),
        ("1000", "1.000"),
        ("1,234", "1.234"),
        (r"\frac{a}{b}", r"\frac{b}{a}"),
        (r"\frac{1}{x+1}", r"\frac{1}{x}+1"),
        ("3.14159", r"\pi"),
        ("1.41", r"\sqrt{2}"),
    ],
    "signs": [
        ("5", "-5"),
        ("-5", "|-5|"),
        ("x-1", "1-x"),
        (r"-\frac{1}{2}", r"\frac{1}{2}"),
        ("a-b", "b-a"),
        (r"\sqrt{2}", r"-\sqrt{2}"),
        ("5", "+-5"),
    ],
    "units and words that change the value": [
        ("5", "5 thousand"),
        ("2", "2 dozen"),
        ("3", "three million"),
        ("60", "1 hour"),
        ("5", "5 hundred"),
        ("2", "half of 2"),
        ("3", "not 3"),
        ("10", "more than 10"),
        ("3", "3 or 4"),
        ("100", "100 squared"),
        ("7", "7 less 1"),
        ("5", r"5\text{ squared}"),
        ("3", r"3\text{ million}"),
    ],
    "relations, negations and dots": [
        ("5", r"\ge 5"),
        ("5", r"\ne 5"),
        ("5", r"\neg 5"),
        ("5", r"\not= 5"),
        ("5", "!=5"),
        ("5", ">5"),
        ("5", r"\leqslant 5"),
        ("x", r"\neq x"),
        (r"\frac{1}{2}", r"\lt\frac{1}{2}"),
        ("0.3", "0.3..."),
        ("0.3", r"0.3\ldots"),
        ("0.3", r"0.\overline{3}"),
    ],
    "bases, letters, variables": [
        ("101_2", "101_3"),
        ("11_2", "10_2"),
        (r"12_{5}", r"12_{6}"),
        ("A", "B"),
        (r"\text{(A)}", "(D)"),
        ("x", "y"),
        ("n", "n+1"),
        (r"\sin x", r"\cos x"),
        ("f(x)", "x"),
        ("xy", "x+y"),
        (r"\log_2 3", r"\log_3 2"),
        ("(2,3)", "(2,3,4)"),
        ("i", "1"),
        ("2i", "2"),
        (r"\infty", r"-\infty"),
        ("x>3", r"x\ge 3"),
        ("x>3", "x<3"),
        ("x>3", "3"),
        ("y=2x", "y=x"),
        ("y=2x+1", "2x"),
    ],
    "matrices": [
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&3\\2&4\end{pmatrix}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", "1"),
    ],
}

SAME = {
    "percent": [
        (r"50\%", "50"),
        (r"12.5\%", "12.5%"),
        ("0.5", r"50\%"),
        (r"\frac{1}{4}", r"25\%"),
        ("7", "7%"),
    ],
    "sets": [
        (r"\{1,2\}", r"\{2,1\}"),
        ("3, 5", "5, 3"),
        (r"\pm 2", "2, -2"),
        ("1,2", r"\{1,2\}"),
        (r"x=1 \text{ or } x=2", "1,2"),
    ],
    "intervals": [
        (r"\left[1,2\right)", "[1, 2)"),
        (r"[2,3]\cup[0,1]", r"[0,1]\cup[2,3]"),
        ("(1,2)", r"(1,\frac{4}{2})"),
        ("(3,4)", r"\left(3,\ 4\right)"),
        (r"4 \text{ and } 5", "4, 5"),
        (r"x \in [0,1)", "[0,1)"),
    ],
    "powers": [
        ("8", "2^3"),
        ("1024", "2^{10}"),
        (r"\sqrt{8}", r"2\sqrt2"),
        ("120", "5!"),
        (r"\frac{5!}{2}", "60"),
        ("n!", "n!"),
        ("5", r"5\!"),
        ("x^2-1", "(x-1)(x+1)"),
        ("0.01", "10^{-2}"),
        ("2^{3x}", "8^x"),
        ("4", r"\sqrt{16}"),
        ("3", r"\log_2 8"),
        (r"\frac{7!}{2}", "2520"),
    ],
    "fractions": [
        ("0.5", r"\frac12"),
        ("1.5", r"1\frac{1}{2}"),
        ("3/4", "0.75"),
        (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt3}"),
        (r"\frac{2}{3}", r"\frac{4}{6}"),
        (r"-\frac{1}{2}", r"\frac{-1}{2}"),
        ("1000000", "1{,}000{,}000"),
        ("3.0", "3"),
        ("-5", "−5"),
    ],
    "units": [
        ("5", r"5\text{ cm}"),
        ("90", r"90^\circ"),
        ("12", r"\$12"),
        ("1000", "1,000"),
        ("7", "x=7"),
        ("36", "36 square inches"),
        ("60", r"60\text{ minutes}"),
        ("15", r"\$15.00"),
    ],
    "relations": [("x>3", "3<x"), ("y=2x+1", "y=1+2x"), (r"x\ge 5", r"x\geq 5")],
    "symbols and matrices": [
        ("xy", "yx"),
        ("n+1", "1+n"),
        (r"2\pi", r"\pi\cdot 2"),
        (r"\infty", r"+\infty"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
    ],
    "letters and bases": [(r"\text{(A)}", "A"), ("C", "(C)"), ("101_2", "101"), ("101_{2}", "101_2"), ("11_4", "12_3")],
}

WRONG = [(name, *pair) for name, pairs in DIFFERENT.items() for pair in pairs]
RIGHT = [(name, *pair) for name, pairs in SAME.items() for pair in pairs]

# A text states one answer: these state another one than the gold, or none.
TEXTS = [
    ("5", "It might be 5."),
    ("5", r"\boxed{4} although some say 5"),
    ("5", r"\boxed{5} no, \boxed{6}"),
    ("5", r"\boxed{5, 6}"),
    ("5", r"5 \boxed{}"),
    ("5", "Final Answer: not 5"),
    ("5", "Final Answer: 4\n5"),
    ("5", r"\boxed{\text{5 or 6}}"),
    ("5", r"\boxed{5 = 6}"),
    ("4", r"\boxed{2+3=5}"),
    ("5", r"\boxed{1}\boxed{2}\boxed{3}"),
    ("5", r"\boxed{5"),
    ("5", "boxed{5}"),
    ("5", r"The answers are \boxed{1}, \boxed{5} and \boxed{7}"),
    ("12", r"\boxed{1}\boxed{2}"),
    ("5", r"\boxed{x}, x=5"),
    ("(3,4)", r"\boxed{4,3}"),
    ("(3,4)", r"\boxed{3}"),
    ("24", r"\boxed{4! + 1}"),
    ("5", "so x = 5."),
    ("5", "#### 5"),
    ("5", r"\boxed{4} 5"),
    ("5", r"\boxed 5"),
    ("5", r"\text{boxed}{5}"),
    ("5", r"\boxed{５}"),
    ("5", "\\boxed{\u202e5}"),
]

# These state it: twice, after another one, in a box within a box, at the end of an equation, behind a marker.
STATED = [
    ("5", r"\boxed{5}. Again: \boxed{5}"),
    ("5", r"First \boxed{4}, no: \boxed{5}"),
    ("5", r"\boxed{\boxed{5}}"),
    ("5", r"\boxed{x = 5}"),
    ("5", r"\boxed{2+3=5}"),
    ("5", "Final Answer: 5"),
    ("5", "\\boxed{4}\nFinal Answer: 5"),
    ("5", r"Final Answer: \boxed{5}"),
    ("5", "**Final Answer:** $5$"),
    ("12", r"so $x=\boxed{12}$."),
    ("(3,4)", r"\boxed{(3,\,4)}"),
]


def word(gold: str, text: str) -> str:
    return verify("auto", gold, text).verdict


def test_there_are_enough():
    assert len(WRONG) >= 120 and len(RIGHT) >= 50


@pytest.mark.parametrize(("kind", "one", "two"), WRONG, ids=lambda x: x[:24])
def test_different_answers_do_not_pass_for_one_another(kind, one, two):
    assert (word(one, rf"\boxed{{{two}}}"), word(two, rf"\boxed{{{one}}}")).count("right") == 0


@pytest.mark.parametrize(("kind", "one", "two"), RIGHT, ids=lambda x: x[:24])
def test_equal_answers_pass(kind, one, two):
    assert (word(one, rf"\boxed{{{two}}}"), word(two, rf"\boxed{{{one}}}")) == ("right", "right")


@pytest.mark.parametrize(("gold", "text"), STATED)
def test_texts_that_state_the_answer(gold, text):
    assert word(gold, text) == "right"


@pytest.mark.parametrize(("gold", "text"), TEXTS)
def test_texts_that_do_not_state_the_answer(gold, text):
    assert word(gold, text) != "right"
