"""Word problems in the manner of GSM8K: short stories with whole numbers, solved in one to four steps."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from grupo.tasks.generators import Generator, Item

NAMES = (
    "Ada", "Amir", "Bea", "Carlos", "Chen", "Dana", "Emeka", "Fatima", "Greta", "Hiro", "Ines", "Jonas", "Kavya", "Leo",
    "Maria", "Noor", "Oskar", "Priya", "Quinn", "Rosa", "Samir", "Tove", "Uma", "Wei", "Yara", "Zoltan",
)  # fmt: skip
THINGS = (
    "apples", "marbles", "stickers", "pencils", "shells", "cards", "buttons", "cookies", "stamps", "beads", "oranges",
    "badges",
)  # fmt: skip

Story = tuple[str, int, tuple[int, ...]]
"""Text with {a}, {b}, {c} for names and {things} for things; answer; the numbers in it."""


# One step ------------------------------------------------------------------------------------------------------------


def _gift(random: Random) -> Story:
    has, gets = random.randint(3, 60), random.randint(3, 60)
    text = f"{{a}} has {has} {{things}}. {{b}} gives {{a}} {gets} more. How many {{things}} does {{a}} have now?"
    return text, has + gets, (has, gets)


def _eaten(random: Random) -> Story:
    left, gone = random.randint(2, 60), random.randint(2, 40)
    text = (
        f"There were {left + gone} {{things}} in a box. {{a}} took {gone} of them. How many {{things}} are left in the "
        "box?"
    )
    return text, left, (left + gone, gone)


def _boxes(random: Random) -> Story:
    boxes, each = random.randint(3, 12), random.randint(3, 15)
    text = f"{{a}} fills {boxes} boxes with {each} {{things}} each. How many {{things}} is that in all?"
    return text, boxes * each, (boxes, each)


def _shared(random: Random) -> Story:
    people, each = random.randint(3, 9), random.randint(2, 15)
    text = (
        f"{{a}} shares {people * each} {{things}} equally among {people} children. How many {{things}} does each child "
        "get?"
    )
    return text, each, (people * each, people)


# Two steps -----------------------------------------------------------------------------------------------------------


def _change(random: Random) -> Story:
    price, count = random.randint(2, 9), random.randint(3, 9)
    paid = -(-(price * count + 1) // 10) * 10
    text = (
        f"{{a}} buys {count} {{things}} at ${price} each and pays with ${paid}. How many dollars of change does {{a}} "
        "get?"
    )
    return text, paid - price * count, (price, count, paid)


def _more_than(random: Random) -> Story:
    first, more = random.randint(5, 60), random.randint(3, 40)
    text = (
        f"{{a}} collected {first} {{things}}. {{b}} collected {more} more than {{a}}. How many {{things}} did the two "
        "collect together?"
    )
    return text, 2 * first + more, (first, more)


def _times_as_many(random: Random) -> Story:
    first, times = random.randint(4, 30), random.randint(2, 6)
    text = (
        f"{{a}} has {first} {{things}}, and {{b}} has {times} times as many. How many more {{things}} than {{a}} does "
        "{b} have?"
    )
    return text, first * (times - 1), (first, times)


def _packs(random: Random) -> Story:
    packs, each = random.randint(3, 12), random.randint(4, 12)
    lost = random.randint(2, packs * each - 1)
    text = (
        f"{{a}} opens {packs} packs of {each} {{things}} and gives {lost} {{things}} to {{b}}. How many {{things}} "
        "does {a} keep?"
    )
    return text, packs * each - lost, (packs, each, lost)


# Three and four steps ------------------------------------------------------------------------------------------------


def _sale(random: Random) -> Story:
    price, count, percent = random.randint(2, 20) * 5, random.randint(2, 6), random.choice((10, 20, 25, 40, 50))
    fee = random.randint(2, 15)
    total = price * count * (100 - percent)
    if total % 100:
        return _sale(random)
    text = (
        f"A chair costs ${price}. {{a}} buys {count} of them with a discount of {percent}% on all chairs, and pays "
        f"${fee} for the delivery. How many dollars does {{a}} pay in all?"
    )
    return text, total // 100 + fee, (price, count, percent, fee)


def _wages(random: Random) -> Story:
    wage, hours, days = random.randint(9, 25), random.randint(3, 8), random.randint(3, 6)
    spent = random.randint(20, wage * hours * days - 20)
    text = (
        f"{{a}} earns ${wage} an hour and works {hours} hours a day for {days} days. Then {{a}} spends ${spent} on a "
        "bicycle. How many dollars are left?"
    )
    return text, wage * hours * days - spent, (wage, hours, days, spent)


def _fraction(random: Random) -> Story:
    parts, each = random.randint(2, 6), random.randint(4, 20)
    more = random.randint(2, 30)
    total = parts * each
    text = (
        f"{{a}} had {total} {{things}} and gave 1/{parts} of them to {{b}}. Then {{a}} gave half of the rest to {{c}}, "
        f"and found {more} more on the way home. How many {{things}} does {{a}} have at the end?"
    )
    rest = total - each
    if rest % 2:
        return _fraction(random)
    return text, rest // 2 + more, (total, parts, more)


def _journey(random: Random) -> Story:
    speed, hours = random.randint(8, 30) * 2, random.randint(2, 5)
    faster, more = random.randint(2, 15) * 2, random.randint(1, 4)
    text = (
        f"{{a}} rides a train at {speed} km per hour for {hours} hours. The train then goes {faster} km per hour "
        f"faster for {more} more hours. How many kilometres has {{a}} travelled?"
    )
    return text, speed * hours + (speed + faster) * more, (speed, hours, faster, more)


def _farm(random: Random) -> Story:
    hens, eggs, eaten = random.randint(4, 15), random.randint(2, 6), random.randint(2, 7)
    price = random.randint(2, 5)
    text = (
        f"{{a}} has {hens} hens that lay {eggs} eggs each per week. The family of {{a}} eats {eaten} eggs a week, and "
        f"the rest is sold at ${price} per egg. How many dollars does {{a}} get for the eggs in 4 weeks?"
    )
    return text, (hens * eggs - eaten) * price * 4, (hens, eggs, eaten, price)


STORIES: tuple[tuple[Callable[[Random], Story], ...], ...] = (
    (_gift, _eaten, _boxes, _shared),
    (_change, _more_than, _times_as_many, _packs),
    (_sale, _wages, _fraction, _journey, _farm),
)


def _word_problem(random: Random, level: int) -> Item:
    story = random.choice(STORIES[level - 1])
    text, answer, numbers = story(random)
    a, b, c = random.sample(NAMES, 3)
    question = text.format(a=a, b=b, c=c, things=random.choice(THINGS))
    return Item(question, str(answer), (story.__name__, numbers))


word_problems = Generator(
    "Short stories with whole numbers, in the manner of GSM8K.",
    ("one step", "two steps", "three or four steps"),
    _word_problem,
    {"number_match": {}},
)
