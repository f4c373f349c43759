"""What the real model is asked: prompts for conversations, and questions with four answers each."""

from __future__ import annotations

from dataclasses import dataclass

PROMPTS = (
    "What is the capital of France?",
    "What is the capital of Japan, and what is it known for?",
    "Name three primary colors.",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "What is 12 plus 30?",
    "Translate 'good morning' into Spanish.",
    "List five animals that live in Africa.",
    "Who wrote Romeo and Juliet?",
    "How do I boil an egg?",
    "Write a Python function that adds two numbers.",
    "Write a SQL query that counts the rows of a table named users.",
    "What is the difference between a lake and a river?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Summarize: The cat sat on the mat. It was warm. The cat fell asleep.",
    "Tell me a joke about computers.",
    "What does HTTP stand for?",
    "How many days are there in a leap year?",
    "Describe the planet Mars in two sentences.",
    "Write a short e-mail that asks a colleague for a report.",
    "What are the benefits of exercise?",
    "Complete the sentence: The early bird",
    "Is a tomato a fruit or a vegetable?",
    "What is the chemical symbol of gold?",
    "Explain what a binary search does.",
    "Name the seven days of the week.",
    "What should I pack for a day at the beach?",
    "Who was Isaac Newton?",
    "Give an example of a metaphor.",
    "Was ist die Hauptstadt von Deutschland?",
    "Quelle est la capitale de l'Italie ?",
    "\u4f60\u597d\uff0c\u4f60\u662f\u8c01\uff1f",
    "Emoji test: \U0001f642\U0001f680 what do they mean?",
    "x",
    "Repeat this exactly: a1b2c3 {} [] <> \\n",
    "Sort these numbers: 9, 3, 27, 1, 14.",
    "What is the boiling point of water in Celsius?",
    "Write a limerick about a robot.",
    "What causes rain?",
    "Give three synonyms for 'happy'.",
    "What is machine learning?",
    "How far is the Moon from the Earth?",
    "Write the first sentence of a mystery novel.",
    "What is the largest ocean on Earth?",
    "Convert 100 kilometers to miles.",
    "Name two countries in South America.",
    "How do bees make honey?",
    "What is the opposite of 'cold'?",
    "Plan a weekend in Paris in four lines.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The beginning of a text and four ends; the first is the right one."""

    text: str
    ends: tuple[str, str, str, str]


def _ask(text: str, *ends: str) -> Question:
    first, second, third, fourth = (f" {end}" for end in ends)
    return Question(text=text, ends=(first, second, third, fourth))


QUESTIONS = (
    _ask("The capital of France is", "Paris", "London", "Berlin", "Rome"),
    _ask("The capital of Germany is", "Berlin", "Paris", "Madrid", "Vienna"),
    _ask("The capital of Italy is", "Rome", "Athens", "Paris", "Lisbon"),
    _ask("The capital of Spain is", "Madrid", "Rome", "Dublin", "Oslo"),
    _ask("The capital of Japan is", "Tokyo", "Beijing", "Seoul", "Bangkok"),
    _ask("The capital of Russia is", "Moscow", "Kiev", "Warsaw", "Prague"),
    _ask("The capital of England is", "London", "Dublin", "Paris", "Berlin"),
    _ask("The capital of China is", "Beijing", "Tokyo", "Hanoi", "Delhi"),
    _ask("The opposite of hot is", "cold", "warm", "red", "tall"),
    _ask("The opposite of up is", "down", "left", "over", "high"),
    _ask("The opposite of day is", "night", "week", "noon", "sun"),
    _ask("The opposite of big is", "small", "large", "green", "fast"),
    _ask("The color of grass is", "green", "blue", "red", "purple"),
    _ask("The color of a clear sky is", "blue", "green", "brown", "black"),
    _ask("The color of snow is", "white", "black", "red", "green"),
    _ask("The color of blood is", "red", "blue", "green", "white"),
    _ask("A week has seven", "days", "months", "hours", "years"),
    _ask("A year has twelve", "months", "days", "weeks", "hours"),
    _ask("An hour has sixty", "minutes", "days", "months", "weeks"),
    _ask("One, two, three, four,", "five", "nine", "one", "seven"),
    _ask("Monday, Tuesday, Wednesday,", "Thursday", "Sunday", "January", "Monday"),
    _ask("January, February, March,", "April", "July", "Friday", "December"),
    _ask("Water freezes and becomes", "ice", "steam", "fire", "sand"),
    _ask("Bees make", "honey", "milk", "bread", "wool"),
    _ask("Cows give us", "milk", "honey", "silk", "ink"),
    _ask("A baby dog is called a", "puppy", "kitten", "calf", "chick"),
    _ask("A baby cat is called a", "kitten", "puppy", "foal", "lamb"),
    _ask("Fish live in", "water", "trees", "clouds", "books"),
    _ask("Birds use their wings to", "fly", "read", "cook", "swim"),
    _ask("We see with our", "eyes", "ears", "hands", "feet"),
    _ask("We hear with our", "ears", "eyes", "knees", "teeth"),
    _ask("The Earth goes around the", "Sun", "Moon", "city", "car"),
    _ask("The largest planet in the solar system is", "Jupiter", "Mars", "Venus", "Mercury"),
    _ask("The chemical formula of water is", "H2O", "CO2", "NaCl", "O2"),
    _ask("Romeo and Juliet was written by William", "Shakespeare", "Dickens", "Newton", "Darwin"),
    _ask("The theory of relativity is the work of Albert", "Einstein", "Camus", "Bell", "Ford"),
    _ask("Plants need sunlight, air and", "water", "music", "iron", "salt"),
    _ask("She opened the umbrella because it began to", "rain", "sing", "sleep", "snore"),
    _ask("He was tired, so he went to", "bed", "war", "Mars", "jail"),
    _ask("In Python, a function begins with the keyword", "def", "fn", "sub", "proc"),
)
