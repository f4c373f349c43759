"""Models as applications write them: what pydantic makes of them is what servers are sent."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from uuid import UUID

from pydantic import (
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    Json,
    NegativeFloat,
    NonNegativeInt,
    PositiveInt,
    RootModel,
    SecretStr,
    StringConstraints,
    conlist,
    create_model,
)
from typing_extensions import TypedDict


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Address(BaseModel):
    street: str
    zip_code: Annotated[str, StringConstraints(pattern=r"^\d{5}(-\d{4})?$")]
    country: str | None = None


class Person(BaseModel):
    """Somebody."""

    name: str = Field(min_length=1, max_length=100, description="of the person")
    age: int = Field(ge=0, le=150)
    address: Address


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Linked(BaseModel):
    value: str = Field(max_length=8)
    next: Linked | None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Pet(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int
    b: str | None = None


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: bool


class Base(BaseModel):
    id: UUID


class Child(Base):
    tags: set[str] = set()


class Point(NamedTuple):
    x: float
    y: float


class Movie(TypedDict):
    title: str
    year: int


Item = TypeVar("Item")


class Page(BaseModel, Generic[Item]):
    items: list[Item]
    total: NonNegativeInt


class Expression(BaseModel):
    left: Expression | float
    operator: Literal["+", "-", "*", "/"]
    right: Expression | float


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    steps: list[Step]
    final_answer: str


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    class_: str = Field(alias="class")
    from_date: date | None = Field(default=None, alias="from-date")


class Invoice(BaseModel):
    number: str = Field(pattern=r"^INV-\d{6}$")
    lines: Annotated[list[Decimal], Field(min_length=1, max_length=200)]
    due: date


class Deep(BaseModel):
    grid: list[list[list[int]]]
    by_name: dict[str, dict[str, list[Color]]]


def _fields(**annotations: Any) -> type[BaseModel]:
    """A model of fields that are required."""
    fields: dict[str, Any] = {name: (annotation, ...) for name, annotation in annotations.items()}
    return create_model("Fields", **fields)


MODELS: list[type[BaseModel]] = [
    *(Address, Person, Tree, Linked, Pet, Closed, Open, Child, Expression, Reasoning, Aliased),
    *(Invoice, Deep, Page[int], Page[Person], RootModel[list[int]], RootModel[dict[str, float]]),
    _fields(price=Decimal),
    _fields(price=Annotated[Decimal, Field(max_digits=6, decimal_places=2)]),
    _fields(price=Annotated[Decimal, Field(gt=0, le=Decimal("99.5"))]),
    _fields(at=datetime, on=date, clock=time),
    _fields(took=timedelta),
    _fields(id=UUID),
    _fields(color=Color, level=Level),
    _fields(answer=Literal["yes", "no"], number=Literal[1, 2, None]),
    _fields(either=int | str | None),
    _fields(maybe=Color | None),
    _fields(count=PositiveInt, loss=NegativeFloat),
    _fields(share=Annotated[float, Field(gt=0, lt=1)]),
    _fields(percent=Annotated[float, Field(ge=0, le=100)]),
    _fields(even=Annotated[int, Field(multiple_of=2, ge=0)]),
    _fields(step=Annotated[float, Field(multiple_of=0.5)]),
    _fields(text=Annotated[str, Field(min_length=3, max_length=140)]),
    _fields(text=Annotated[str, Field(max_length=1000)]),
    _fields(code=Annotated[str, StringConstraints(pattern="^[A-Z]{2,3}$", to_upper=True)]),
    _fields(slug=Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(?:-[a-z0-9]+)*$")]),
    _fields(pairs=list[tuple[str, int]]),
    _fields(point=Point),
    _fields(movie=Movie),
    _fields(several=tuple[int, ...], empty=tuple[()]),
    _fields(three=conlist(int, min_length=3, max_length=3)),
    _fields(unique=set[int], frozen=frozenset[str]),
    _fields(scores=dict[str, int]),
    _fields(by_level=dict[Level, str]),
    _fields(by_color=dict[Color, Annotated[list[int], Field(max_length=2)]]),
    _fields(by_code=dict[Annotated[str, StringConstraints(pattern="^[a-z]{2}$")], str]),
    _fields(named=Annotated[dict[str, int], Field(min_length=1, max_length=3)]),
    _fields(people=list[Person], best=Person | None),
    _fields(url=AnyUrl, site=HttpUrl),
    _fields(v4=IPv4Address, v6=IPv6Address),
    _fields(path=Path, secret=SecretStr),
    _fields(raw=bytes),
    _fields(anything=Any, object=dict[str, Any]),
    _fields(encoded=Json[list[int]]),
    _fields(nothing=None),
    _fields(any_tree=Tree | list[Tree] | dict[str, Tree]),
]
