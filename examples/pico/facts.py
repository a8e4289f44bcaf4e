"""What pico is taught to know by heart: word lists and small tables of facts.

A model of three million parameters holds a few hundred facts at most, so these tables are short and plain.
Everything here was written by hand for this purpose; `corpus.py` turns it into questions, answers and stories.
"""

from __future__ import annotations

CAPITALS: dict[str, str] = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Austria": "Vienna", "Greece": "Athens", "Poland": "Warsaw", "Norway": "Oslo", "Sweden": "Stockholm",
    "Finland": "Helsinki", "Denmark": "Copenhagen", "Ireland": "Dublin", "Belgium": "Brussels",
    "Hungary": "Budapest", "Iceland": "Reykjavik", "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana",
    "Canada": "Ottawa", "Mexico": "Mexico City", "Russia": "Moscow", "Turkey": "Ankara", "Thailand": "Bangkok",
    "Vietnam": "Hanoi", "Nepal": "Kathmandu", "Australia": "Canberra", "Ghana": "Accra", "Iran": "Tehran",
    "Iraq": "Baghdad", "England": "London", "Scotland": "Edinburgh", "Croatia": "Zagreb", "Serbia": "Belgrade",
    "Romania": "Bucharest",
}  # fmt: skip

OPPOSITES: list[tuple[str, str]] = [
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("left", "right"), ("day", "night"), ("old", "new"),
    ("fast", "slow"), ("happy", "sad"), ("light", "dark"), ("open", "closed"), ("high", "low"), ("wet", "dry"),
    ("early", "late"), ("full", "empty"), ("hard", "soft"), ("long", "short"),
    ("loud", "quiet"), ("rich", "poor"), ("strong", "weak"), ("thick", "thin"), ("true", "false"),
    ("near", "far"), ("clean", "dirty"), ("good", "bad"), ("first", "last"), ("inside", "outside"),
    ("begin", "end"), ("push", "pull"), ("buy", "sell"), ("win", "lose"), ("give", "take"), ("love", "hate"),
    ("black", "white"), ("sweet", "sour"), ("wide", "narrow"), ("deep", "shallow"),
    ("sharp", "blunt"), ("brave", "afraid"),
]  # fmt: skip

ANIMAL_SOUNDS: dict[str, str] = {
    "dog": "woof", "cat": "meow", "cow": "moo", "duck": "quack", "sheep": "baa", "pig": "oink", "horse": "neigh",
    "lion": "roar", "frog": "croak", "bee": "buzz", "owl": "hoot", "snake": "hiss", "mouse": "squeak",
    "crow": "caw", "donkey": "hee-haw", "wolf": "howl", "bird": "tweet", "turkey": "gobble", "hen": "cluck",
}  # fmt: skip

ANIMAL_BABIES: dict[str, str] = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "duck": "duckling", "sheep": "lamb", "pig": "piglet",
    "horse": "foal", "lion": "cub", "frog": "tadpole", "hen": "chick", "goat": "kid", "swan": "cygnet",
    "goose": "gosling", "kangaroo": "joey",
}  # fmt: skip

ANIMAL_LEGS: dict[str, str] = {
    "dog": "four", "cat": "four", "bird": "two", "spider": "eight", "ant": "six", "bee": "six", "snake": "no",
    "horse": "four", "duck": "two", "fish": "no", "beetle": "six", "frog": "four", "worm": "no", "hen": "two",
}  # fmt: skip

COLOURS: dict[str, str] = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "a tomato": "red",
    "coal": "black", "a carrot": "orange", "a lemon": "yellow", "milk": "white", "a strawberry": "red",
    "the sea": "blue", "a frog": "green", "chocolate": "brown", "a flamingo": "pink", "a crow": "black",
    "the sun": "yellow", "an elephant": "grey", "a plum": "purple", "a polar bear": "white", "blood": "red",
    "a leaf": "green", "a pumpkin": "orange", "a swan": "white", "a cherry": "red", "wood": "brown",
}  # fmt: skip

KINDS: dict[str, str] = {
    "apple": "fruit", "banana": "fruit", "pear": "fruit", "grape": "fruit", "carrot": "vegetable",
    "potato": "vegetable", "onion": "vegetable", "cabbage": "vegetable", "dog": "animal", "horse": "animal",
    "tiger": "animal", "rabbit": "animal", "rose": "flower", "tulip": "flower", "daisy": "flower",
    "hammer": "tool", "saw": "tool", "spoon": "tool", "piano": "instrument", "violin": "instrument",
    "drum": "instrument", "flute": "instrument", "oak": "tree", "pine": "tree", "birch": "tree", "red": "colour",
    "blue": "colour", "green": "colour", "gold": "metal", "iron": "metal", "silver": "metal", "copper": "metal",
    "shirt": "garment", "coat": "garment", "bus": "vehicle", "train": "vehicle", "bicycle": "vehicle",
    "chess": "game", "tennis": "sport", "football": "sport", "Earth": "planet", "Mars": "planet",
    "Venus": "planet",
}  # fmt: skip

PAST_TENSES: dict[str, str] = {
    "go": "went", "eat": "ate", "see": "saw", "run": "ran", "take": "took", "give": "gave", "come": "came",
    "make": "made", "write": "wrote", "sing": "sang", "swim": "swam", "drink": "drank", "buy": "bought",
    "think": "thought", "find": "found", "fly": "flew", "know": "knew", "sleep": "slept", "walk": "walked",
    "play": "played", "jump": "jumped", "look": "looked", "cook": "cooked", "help": "helped",
}  # fmt: skip

PLURALS: dict[str, str] = {
    "cat": "cats", "dog": "dogs", "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth",
    "man": "men", "woman": "women", "goose": "geese", "leaf": "leaves", "box": "boxes", "city": "cities",
    "sheep": "sheep", "fish": "fish", "baby": "babies", "knife": "knives", "book": "books", "wolf": "wolves",
    "bus": "buses", "apple": "apples", "tree": "trees", "house": "houses",
}  # fmt: skip

#: Question and answer that fit no table: units, shapes, simple science. The answer closes the sentence.
LOOSE_FACTS: list[tuple[str, str, str]] = [
    ("How many minutes are in an hour?", "An hour has", "sixty minutes"),
    ("How many seconds are in a minute?", "A minute has", "sixty seconds"),
    ("How many hours are in a day?", "A day has", "twenty-four hours"),
    ("How many days are in a week?", "A week has", "seven days"),
    ("How many months are in a year?", "A year has", "twelve months"),
    ("How many days are in a year?", "A year has", "365 days"),
    ("How many metres are in a kilometre?", "A kilometre has", "1000 metres"),
    ("How many centimetres are in a metre?", "A metre has", "100 centimetres"),
    ("How many grams are in a kilogram?", "A kilogram has", "1000 grams"),
    ("How many years are in a century?", "A century has", "100 years"),
    ("How many sides does a triangle have?", "A triangle has", "three sides"),
    ("How many sides does a square have?", "A square has", "four sides"),
    ("How many sides does a pentagon have?", "A pentagon has", "five sides"),
    ("How many sides does a hexagon have?", "A hexagon has", "six sides"),
    ("How many letters are in the alphabet?", "The alphabet has", "26 letters"),
    ("How many colours are in a rainbow?", "A rainbow has", "seven colours"),
    ("How many wheels does a bicycle have?", "A bicycle has", "two wheels"),
    ("How many wheels does a car have?", "A car has", "four wheels"),
    ("How many fingers are on one hand?", "One hand has", "five fingers"),
    ("How many planets go around the sun?", "The sun has", "eight planets"),
    ("How many legs does a chair have?", "A chair has", "four legs"),
    ("How many eggs are in a dozen?", "A dozen is", "twelve eggs"),
    ("What do bees make?", "Bees make", "honey"),
    ("What do cows give us to drink?", "Cows give us", "milk"),
    ("What do hens lay?", "Hens lay", "eggs"),
    ("What do plants need to grow?", "Plants need", "water and light"),
    ("What is ice made of?", "Ice is made of", "frozen water"),
    ("What is bread made of?", "Bread is made of", "flour"),
    ("What is paper made of?", "Paper is made of", "wood"),
    ("What is glass made of?", "Glass is made of", "sand"),
    ("What is cheese made of?", "Cheese is made of", "milk"),
    ("Where do fish live?", "Fish live in", "water"),
    ("Where do penguins live?", "Penguins live in", "the south"),
    ("Where do camels live?", "Camels live in", "the desert"),
    ("Where does the sun rise?", "The sun rises in", "the east"),
    ("Where does the sun set?", "The sun sets in", "the west"),
    ("What falls from clouds?", "Clouds bring", "rain"),
    ("What goes around the Earth?", "Around the Earth goes", "the moon"),
    ("What does the Earth go around?", "The Earth goes around", "the sun"),
    ("What is the largest planet?", "The largest planet is", "Jupiter"),
    ("What is the largest ocean?", "The largest ocean is", "the Pacific"),
    ("What is the tallest animal?", "The tallest animal is", "the giraffe"),
    ("What is the largest animal?", "The largest animal is", "the blue whale"),
    ("What is the fastest land animal?", "The fastest land animal is", "the cheetah"),
    ("What is the longest river in Africa?", "The longest river in Africa is", "the Nile"),
    ("What is the highest mountain?", "The highest mountain is", "Mount Everest"),
    ("What is the coldest season?", "The coldest season is", "winter"),
    ("What is the warmest season?", "The warmest season is", "summer"),
    ("When do leaves fall?", "Leaves fall in", "autumn"),
    ("When do flowers bloom?", "Flowers bloom in", "spring"),
    ("What do we use to see?", "We see with", "our eyes"),
    ("What do we use to hear?", "We hear with", "our ears"),
    ("What do we use to smell?", "We smell with", "our nose"),
    ("What pumps blood around the body?", "Blood is pumped by", "the heart"),
    ("What gas do we breathe?", "We breathe", "oxygen"),
    ("What is the freezing point of water?", "Water freezes at", "0 degrees"),
    ("What is the boiling point of water?", "Water boils at", "100 degrees"),
    ("What colour do you get from blue and yellow?", "Blue and yellow make", "green"),
    ("What colour do you get from red and yellow?", "Red and yellow make", "orange"),
    ("What colour do you get from red and blue?", "Red and blue make", "purple"),
    ("Who works in a school?", "In a school works", "a teacher"),
    ("Who flies a plane?", "A plane is flown by", "a pilot"),
    ("Who bakes bread?", "Bread is baked by", "a baker"),
    ("Who helps sick people?", "Sick people are helped by", "a doctor"),
    ("Who puts out fires?", "Fires are put out by", "a firefighter"),
    ("Who grows food?", "Food is grown by", "a farmer"),
]

DAYS: list[str] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS: list[str] = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip

NAMES: list[str] = [
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia",
    "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Zoe",
]  # fmt: skip
SHE: frozenset[str] = frozenset(
    ["Anna", "Clara", "Emma", "Grace", "Ida", "Kate", "Mia", "Olga", "Rosa", "Tina", "Wendy", "Zoe"]
)
THINGS: list[str] = [
    "apples", "books", "coins", "stones", "pens", "cards", "eggs", "flowers", "keys", "cups", "boxes", "balls",
    "pears", "shells", "stamps", "buttons", "toys", "cakes",
]  # fmt: skip

#: Words for spelling, copying, counting and sorting.
WORDS: list[str] = [
    "apple", "bread", "chair", "dance", "eagle", "fence", "glass", "house", "ink", "jacket", "kite", "lamp",
    "moon", "nest", "orange", "paper", "queen", "river", "stone", "table", "uncle", "voice", "water", "yellow",
    "zebra", "ball", "cat", "dog", "egg", "fish", "goat", "hat", "island", "jam", "key", "leaf", "milk", "nose",
    "ocean", "pen", "quiet", "rain", "ship", "tree", "under", "valley", "wind", "year", "bird", "cloud", "door",
    "ear", "flower", "garden", "hand", "ice", "juice", "king", "light", "mouse", "night", "onion", "plant",
    "rabbit", "sand", "train", "village", "window", "bridge", "candle", "desk", "engine", "forest", "green",
    "honey", "jungle", "kitten", "lemon", "market", "number", "owl", "pocket", "ring", "spoon", "tiger",
    "violin", "winter", "basket", "camel", "drum", "field", "grass", "horse", "ladder", "mirror", "needle",
    "pencil", "road", "silver", "turtle", "wagon", "autumn", "butter", "castle", "dinner", "farmer", "ginger",
    "hammer", "jelly", "letter", "monkey", "noodle", "parrot", "rocket", "summer", "tomato", "wolf", "bottle",
    "cherry", "dragon", "finger", "guitar", "insect", "kettle", "magnet", "pepper", "robot", "sugar", "ticket",
]  # fmt: skip

# Stories ----------------------------------------------------------------------------------------------------

PLACES: list[str] = [
    "the garden", "the park", "the forest", "the kitchen", "the market", "the beach", "the village", "the school",
    "the river", "the farm", "the library", "the old house", "the hill", "the station",
]  # fmt: skip
WEATHER: list[str] = [
    "The sun was warm", "It was raining", "It was a cold day", "The wind was strong", "The sky was grey",
    "It was a quiet evening", "Snow was falling", "It was early in the morning", "The air was fresh",
]  # fmt: skip
ADJECTIVES: list[str] = [
    "small", "old", "red", "blue", "shiny", "broken", "heavy", "golden", "strange", "pretty", "wooden", "green",
]  # fmt: skip
OBJECTS: list[str] = [
    "box", "key", "ball", "lamp", "boat", "book", "hat", "cup", "kite", "bell", "stone", "coin", "letter", "map",
]  # fmt: skip
PETS: list[str] = ["dog", "cat", "rabbit", "mouse", "bird", "horse", "goat", "duck", "fox", "frog"]
FEELINGS: list[str] = ["happy", "surprised", "tired", "proud", "curious", "afraid", "hungry", "calm", "sad"]
FOODS: list[str] = ["bread", "soup", "cake", "cheese", "an apple", "a pear", "rice", "honey", "some milk"]

# Small talk -------------------------------------------------------------------------------------------------

#: Questions that mean the same, and the answers that fit any of them.
SMALL_TALK: list[tuple[list[str], list[str]]] = [
    (["Hello!", "Hi!", "Hi there!", "Hello there.", "Hey!", "hello", "hi"],
     ["Hello! How can I help you?", "Hi! What can I do for you?"]),
    (["Good morning!", "Good morning, pico."], ["Good morning! How can I help you?"]),
    (["Good evening!", "Good evening, pico."], ["Good evening! How can I help you?"]),
    (["Good night!", "Good night, pico."], ["Good night! Sleep well."]),
    (["Who are you?", "What are you?", "Tell me about yourself.", "Please introduce yourself."],
     ["I am pico, a small language model.", "I am pico, a small language model. I can answer short questions."]),
    (["What is your name?", "What's your name?", "Do you have a name?"], ["My name is pico."]),
    (["How are you?", "How are you today?", "How do you do?", "Are you well?"],
     ["I am fine, thank you. How are you?", "I am very well, thank you."]),
    (["I am fine.", "I am fine too.", "Very well, thanks."], ["I am glad to hear that."]),
    (["Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "thanks", "Great, thank you."],
     ["You are welcome!", "You are welcome. I am happy to help."]),
    (["Goodbye!", "Bye!", "See you later.", "Bye bye.", "I have to go now."],
     ["Goodbye! Have a nice day.", "Goodbye! See you soon."]),
    (["What can you do?", "How can you help me?", "What are you good at?"],
     ["I can add small numbers, sort words, spell, count and answer simple questions."]),
    (["Are you a human?", "Are you a person?", "Are you real?"], ["No, I am a small language model."]),
    (["Are you a robot?", "Are you a computer?"], ["I am a small language model. I run on a computer."]),
    (["How old are you?", "When were you born?"], ["I have no age. I am a language model."]),
    (["Where do you live?", "Where are you?"], ["I live inside a computer."]),
    (["How large are you?", "Are you large?", "Are you small?"], ["I am very small, even for a language model."]),
    (["Can you help me?", "I need help.", "Please help me."], ["Of course! What is your question?"]),
    (["You are nice.", "Well done!", "Good job!", "That is right."], ["Thank you! That is kind of you."]),
    (["That is wrong.", "You are wrong.", "No, that is not right."],
     ["I am sorry. I am a small model and I make mistakes."]),
    (["I am sad.", "I feel sad today.", "I had a bad day."], ["I am sorry to hear that. I hope you feel better soon."]),
    (["I am happy.", "I feel great today!", "I had a good day."], ["That is wonderful to hear!"]),
    (["Tell me a joke.", "Do you know a joke?", "Make me laugh."],
     ["Why did the book look sad? It had too many problems.", "What has keys but no doors? A piano."]),
    (["Do you like music?", "Do you like books?", "Do you like tea?", "Do you like rain?"],
     ["I cannot feel, but many people do."]),
    (["What is the weather like?", "Will it rain today?"], ["I am sorry, I cannot see the weather."]),
    (["What time is it?", "What day is it today?"], ["I am sorry, I do not have a clock."]),
    (["Can you write a poem?", "Write me a short poem.", "Please write a poem."],
     ["The moon is bright, the night is long, the bird will sing a quiet song."]),
]  # fmt: skip

SYSTEM_PROMPTS: list[str] = [
    "You are a helpful assistant.", "You are pico, a small language model.", "Answer in one short sentence.",
    "You are a friendly assistant.", "Be brief and polite.", "You are a helpful and honest assistant.",
    "You answer questions.", "You are a teacher for young children.", "Answer the question of the user.",
]  # fmt: skip
