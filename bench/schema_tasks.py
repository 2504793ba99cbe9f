"""Tasks with a JSON schema each: what programs ask of a model.

A task is one of twenty things to describe in one of ten shapes of schema, which are
those of public collections: flat records, enumerations, nested objects, arrays of
objects, optional and nullable fields, dates and bounded numbers.
"""

from typing import Any, NamedTuple

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "maxLength": 40}
WORDS: Schema = {"type": "array", "items": TEXT, "maxItems": 3}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 999}
DATE: Schema = {"type": "string", "format": "date"}
# Things, and words that belong to them: two texts, a number and some kinds.
THINGS = {
    "a person": ("name", "city", "age", ("adult", "child")),
    "a book": ("title", "author", "pages", ("novel", "poetry", "science")),
    "a film": ("title", "director", "minutes", ("drama", "comedy")),
    "a recipe": ("dish", "cuisine", "servings", ("easy", "hard")),
    "a hotel": ("hotel", "street", "rooms", ("budget", "luxury")),
    "a flight": ("origin", "destination", "seats", ("on time", "late")),
    "a song": ("song", "singer", "seconds", ("rock", "jazz", "folk")),
    "a country": ("country", "capital", "regions", ("island", "inland")),
    "a company": ("company", "industry", "employees", ("public", "private")),
    "a product": ("product", "brand", "stock", ("new", "used")),
    "an order": ("customer", "article", "quantity", ("open", "paid", "sent")),
    "a bug report": ("summary", "component", "votes", ("low", "high")),
    "a meeting": ("topic", "place", "guests", ("planned", "over")),
    "a course": ("course", "teacher", "hours", ("online", "on site")),
    "a plant": ("plant", "family", "height_cm", ("tree", "herb")),
    "an animal": ("animal", "habitat", "weight_kg", ("mammal", "bird")),
    "a city": ("city", "river", "districts", ("large", "small")),
    "a car": ("model", "maker", "doors", ("electric", "diesel")),
    "a match": ("home_team", "away_team", "goals", ("won", "lost", "drawn")),
    "a drug": ("drug", "maker", "dose_mg", ("tablet", "syrup")),
}


class Task(NamedTuple):
    """A prompt with the schema of its answer."""

    name: str
    prompt: str
    schema: Schema


def record(**properties: Schema) -> Schema:
    """Returns the schema of an object with these properties, all of them required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def nullable(schema: Schema) -> Schema:
    """Returns the schema of a value or null, as pydantic writes it."""
    return {"anyOf": [schema, {"type": "null"}]}


def _shapes(a: str, b: str, n: str, kinds: tuple[str, ...]) -> dict[str, Schema]:
    """Returns a schema of each shape, with names for two texts, a number and kinds."""
    kind: Schema = {"type": "string", "enum": list(kinds)}
    flat = {a: TEXT, b: TEXT, n: COUNT}
    optional = record(**flat, note=TEXT) | {"required": [a]}
    part = record(**{a: TEXT, n: COUNT})
    return {
        "flat": record(**flat),
        "enum": record(**{a: TEXT, "kind": kind, "sure": {"type": "boolean"}}),
        "nested": record(**{a: TEXT, "details": record(**{b: TEXT, n: COUNT})}),
        "list": record(items={"type": "array", "items": part, "maxItems": 3}),
        "tags": record(**flat, tags=WORDS),
        "nullable": record(**{a: TEXT, b: nullable(TEXT), n: nullable(COUNT)}),
        "optional": optional,
        "date": record(**{a: TEXT, "created_at": DATE, "updated_at": DATE}),
        "either": record(value={"anyOf": [part, record(**{b: TEXT, "kind": kind})]}),
        "long": record(
            identifier=COUNT,
            description=TEXT,
            **flat,
            status=kind,
            confirmed={"type": "boolean"},
            related_to=nullable(record(**{b: TEXT})),
        ),
    }


def tasks(count: int) -> list[Task]:
    """Returns the first of 200 tasks, in an order that mixes things and shapes."""
    found = []
    for turn in range(10):
        for place, (thing, words) in enumerate(THINGS.items()):
            shapes = list(_shapes(*words).items())
            shape, schema = shapes[(turn + place) % len(shapes)]
            prompt = f"Describe {thing} as JSON.\n"
            found.append(Task(f"{shape} {thing}", prompt, schema))
    return found[:count]
