"""Items of the built-in tasks, drawn one by one: a question, its exact answer, and what makes two items the same.

Every function draws from the `random.Random` that it is given and from nothing else. Nothing is evaluated as text:
expressions are trees, with values computed on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from decimal import Decimal
from random import Random
from typing import Any


@dataclass(frozen=True)
class Item:
    """One question of a task."""

    question: str
    answer: str
    key: Hashable
    """Equal for items of which one gives the other away: the same numbers in another order, other names in a story."""
    columns: dict[str, Any] = field(default_factory=dict)
    """What rewards need beside the answer."""


@dataclass(frozen=True)
class Generator:
    """A task whose items are drawn."""

    description: str
    levels: tuple[str, ...]
    """What each difficulty level asks for, from level 1 on."""
    draw: Callable[[Random, int], Item | None]
    """An item of a level; None where the draw came to nothing."""
    rewards: dict[str, dict[str, Any]]


# Expressions ---------------------------------------------------------------------------------------------------------

_STRENGTH = {"+": 1, "-": 1, "*": 2, "/": 2}


@dataclass(frozen=True)
class Tree:
    """An expression of whole numbers with its value."""

    value: int
    operator: str = ""
    left: Tree | None = None
    right: Tree | None = None

    def __str__(self) -> str:
        if self.left is None or self.right is None:
            return str(self.value)
        strength = _STRENGTH[self.operator]
        left = f"({self.left})" if self.left.strength() < strength else str(self.left)
        # a - (b - c) and a / (b * c) need theirs; a + (b - c) does not.
        binds = strength + (self.operator in "-/")
        right = f"({self.right})" if self.right.strength() < binds else str(self.right)
        return f"{left} {self.operator} {right}"

    def strength(self) -> int:
        return _STRENGTH.get(self.operator, 3)

    def key(self) -> Hashable:
        """The same for trees that differ in the order of summands or factors only."""
        if self.left is None or self.right is None:
            return self.value
        parts = [self.left.key(), self.right.key()]
        return (self.operator, *(sorted(parts, key=repr) if self.operator in "+*" else parts))


def joined(operator: str, left: Tree, right: Tree) -> Tree | None:
    """`left operator right`; None for a division that leaves a remainder."""
    a, b = left.value, right.value
    if operator == "/":
        return Tree(a // b, operator, left, right) if b and a % b == 0 else None
    return Tree({"+": a + b, "-": a - b, "*": a * b}[operator], operator, left, right)


def _drawn_tree(random: Random, count: int, largest: int, operators: str, branching: bool) -> Tree | None:
    """A tree with `count` numbers; without `branching` it is read from left to right, up to the rules of precedence."""
    if count == 1:
        return Tree(random.randint(2, largest))
    operator = random.choice(operators)
    right_count = random.randint(1, count - 1) if branching and operator != "/" else 1
    left = _drawn_tree(random, count - right_count, largest, operators, branching)
    if left is None:
        return None
    if operator == "/":
        divisors = [number for number in range(2, 13) if left.value and left.value % number == 0]
        return joined("/", left, Tree(random.choice(divisors))) if divisors else None
    right = Tree(random.randint(2, 12)) if operator == "*" and right_count == 1 else None
    right = right or _drawn_tree(random, right_count, largest, operators, branching)
    return None if right is None else joined(operator, left, right)


_CHAINS = (  # numbers, the largest of them, operators, whether there are parentheses
    (2, 50, "+-", False),
    (3, 20, "+-*", False),
    (4, 50, "+-*", True),
    (5, 100, "+-*", True),
    (6, 100, "+-*/", True),
)
LARGEST_RESULT = 100_000


def _chain(random: Random, level: int) -> Item | None:
    count, largest, operators, branching = _CHAINS[level - 1]
    tree = _drawn_tree(random, count, largest, operators, branching)
    if tree is None or abs(tree.value) > LARGEST_RESULT or ("(" in str(tree)) != branching:
        return None
    return Item(f"What is {tree}?", str(tree.value), tree.key())


arithmetic = Generator(
    "Sums, differences, products and quotients of whole numbers; the usual precedence holds.",
    (
        "a + b and a - b up to 50",
        "three numbers up to 20, + - *",
        "four numbers up to 50, + - * and parentheses",
        "five numbers up to 100, + - * and parentheses",
        "six numbers up to 100, + - * / and parentheses",
    ),
    _chain,
    {"number_match": {}},
)


# Countdown -----------------------------------------------------------------------------------------------------------

_COUNTDOWNS = ((3, 20), (4, 25), (5, 50), (6, 100))  # numbers, the largest of them
LARGEST_TARGET = 999


def _countdown(random: Random, level: int) -> Item | None:
    count, largest = _COUNTDOWNS[level - 1]
    numbers = [random.randint(1, largest) for _ in range(count)]
    trees = [Tree(number) for number in numbers]
    while len(trees) > 1:
        left, right = (trees.pop(random.randrange(len(trees))) for _ in range(2))
        tree = joined(random.choice("++-*/"), left, right)
        if tree is None or not 0 < tree.value <= LARGEST_TARGET:
            return None
        trees.append(tree)
    (solution,) = trees
    target = solution.value
    if target in numbers:
        return None
    question = (
        f"Combine the numbers {', '.join(map(str, numbers))} with + - * / and parentheses so that the result is "
        f"{target}. Use each number at most once. Write the expression, and nothing else, in the last line."
    )
    return Item(question, str(solution), (tuple(sorted(numbers)), target), {"numbers": list(numbers), "target": target})


countdown = Generator(
    "Reach a target with given numbers, each used at most once; every puzzle has a solution.",
    tuple(f"{count} numbers up to {largest}" for count, largest in _COUNTDOWNS),
    _countdown,
    {"countdown": {}},
)


# Sorting -------------------------------------------------------------------------------------------------------------

_LISTS = ((4, 0, 20, 0), (6, 0, 99, 0), (8, -99, 99, 0), (10, -99, 99, 1), (12, -9, 9, 3))
# numbers, the smallest, the largest, decimal places at most


def _sorting(random: Random, level: int) -> Item | None:
    count, smallest, largest, places = _LISTS[level - 1]
    chosen: dict[Decimal, str] = {}
    while len(chosen) < count:
        scale = 10 ** random.randint(min(places, 1), places)
        number = Decimal(random.randint(smallest * scale, largest * scale)) / scale
        chosen[number] = f"{number:f}"
    values = list(chosen)
    random.shuffle(values)
    descending = level > 1 and random.random() < 0.5
    order = "descending" if descending else "ascending"
    question = (
        f"Sort these numbers in {order} order: {', '.join(chosen[value] for value in values)}. Write them in the last "
        "line, separated by commas."
    )
    answer = ", ".join(chosen[value] for value in sorted(values, reverse=descending))
    return Item(question, answer, frozenset(values))


sorting = Generator(
    "Put a list of numbers in order.",
    (
        "4 numbers from 0 to 20, ascending",
        "6 numbers from 0 to 99, in either order",
        "8 numbers from -99 to 99",
        "10 numbers from -99 to 99 with one decimal place",
        "12 numbers from -9 to 9 with up to three decimal places",
    ),
    _sorting,
    {"number_list": {}},
)


# Letters -------------------------------------------------------------------------------------------------------------

_SHORT = """
acorn apple arrow baker beach berry bread brook cabin candy cargo cello chess cliff cloud coral daisy eagle ember error
fairy ferry field flute frost giant glass grape grass happy hazel hello horse igloo jelly jolly kayak kitty ladle lemon
level lilac llama mango maple merry moose motor noise ocean olive onion otter paper pearl penny piano puppy queen radar
raven river robin rotor salad sheep silly skill spoon steel storm sugar teeth toast tooth tulip uncle water wheat yacht
""".split()  # noqa: SIM905
_MIDDLE = """
almond anchor balloon banana barrel basket beetle blanket blossom buffalo butter cabbage candle carrot cherry coconut
coffee cottage cricket cushion diamond dolphin dragon eleven feather flannel giraffe glacier gorilla hammer harbour
honey hammock insect kitchen kettle lantern lettuce lobster mammoth meadow mirror mustard needle orchard oyster paddle
palette parrot pebble pepper pillow pottery pretzel pumpkin rabbit raccoon ribbon saddle scooter seaweed slipper spinach
squirrel sunset tobacco trumpet tunnel turnip unicorn valley village volcano walrus whisper willow window
""".split()  # noqa: SIM905
_LONG = """
accordion alligator amphibian asparagus assassination barbershop bookkeeper broccoli butterfly caterpillar chandelier
cinnamon committee corridor dandelion dictionary dinosaur efficiency embarrassment excellence fireplace gingerbread
grasshopper greenhouse helicopter hippopotamus intermission kindergarten lighthouse marmalade millennium mississippi
mozzarella necessary newsletter nightingale occurrence orchestra parallelogram peppermint pineapple possession
quarrelsome questionnaire raspberry refrigerator rhododendron saxophone strawberry successful sunflower tangerine
television tennessee thunderstorm toothbrush typewriter umbrella watermelon wheelbarrow woodpecker xylophone
""".split()  # noqa: SIM905


def _letters(random: Random, level: int) -> Item:
    text = {
        1: lambda: random.choice(_SHORT),
        2: lambda: random.choice(_MIDDLE),
        3: lambda: random.choice(_LONG),
        4: lambda: " ".join(random.sample(_SHORT + _MIDDLE, 3)),
        5: lambda: " ".join(random.sample(_MIDDLE + _LONG, 6)),
    }[level]()
    letters = sorted(set(text) - {" "})
    # Mostly letters that are there, and more often those that are there more than once.
    present = random.choice(letters) if random.random() < 0.5 else random.choice(text.replace(" ", ""))
    letter = present if random.random() < 0.85 else random.choice("abcdefghijklmnopqrstuvwxyz")
    question = f'How many times does the letter "{letter}" occur in "{text}"?'
    return Item(question, str(text.count(letter)), (text, letter))


letter_counting = Generator(
    "Count a letter in a word or a phrase.",
    ("words of up to 5 letters", "words of 5 to 8 letters", "longer words", "3 words", "6 words"),
    _letters,
    {"number_match": {}},
)
