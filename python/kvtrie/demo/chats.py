"""The twelve conversations of the demo: a common system prompt, three questions each.

Plain text of ordinary length, so the shares of the cache are realistic.
"""

from __future__ import annotations

__all__ = ["CHATS", "SYSTEM"]

SYSTEM = """\
You are the desk assistant of a small public library. People come to you with questions about
history, science, cooking, travel, music and repairs, and you answer all of them in the same
way: one or two short sentences, in plain words, without lists and without greetings. If a
question asks for a number, give the number first and the reason after it. If you are not
certain, say so openly and name the shelf on which the answer is likely to be found. Never
invent a source, never repeat the question, and never give more than what was asked for.
Visitors often come back to an earlier topic, so keep in mind what was said before."""

_QUESTIONS = """\
I am preparing a talk for school about the moon, and I would like to begin with a fact that
surprises people. My teacher said that the moon moves a little further away from us every year,
because of the tides. Is that true, and how far does it move in one year?

Good, I will use that. A friend of mine objects that the moon always looks the same size to him,
whenever he looks at it from his window in the evening. What should I tell him, so that he
understands why nobody can see this change with bare eyes?

Now I need a last sentence for the talk, something about the people who walked there. I remember
that there were several landings, and that the last one was long before I was born. Which year
was it, and what did they leave on the ground for us?

We want to bake bread at home for the first time, and we have flour, salt, water and a packet of
dry yeast, but no machine and no scale. The recipe says that the dough has to rest for a long
time before it goes into the oven. Why is this resting necessary?

Our dough has rested for two hours now, and it looks much bigger, but it sticks to our hands and
to the table whenever we touch it. My sister wants to add a lot more flour. Is she right, or is
there a better way to handle a wet dough?

The bread is in the oven, and the crust is already quite dark, although the recipe asks for
another twenty minutes. We are afraid that it will burn outside and stay wet inside. What can we
do now, and how do we find out when it is done?

My bicycle makes a clicking noise once per turn of the pedals, but only when I push hard, for
example on the hill in front of the library. When I roll without pedalling, it is perfectly
silent. Which part should I look at first, and do I need a special tool?

I have looked at the pedals, as you said, and the left one was loose. I tried to tighten it with
a wrench, but it seems to turn the wrong way and only gets looser. Am I doing something wrong,
or is the thread already damaged?

It is tight now, and the noise has become much quieter, but it is not gone completely. The chain
is three years old, and I have never measured it or cleaned it properly. Could an old chain be
the reason, and how do I see that it is worn out?

For an essay about the Roman Empire I have to explain why roads were so important to it. I know
that they were built for soldiers, but surely other people used them as well. Can you tell me
who else travelled on them, and what they carried with them?

That helps a lot. In a museum I saw a stone pillar that stood beside such a road, with letters
and a number cut into it. The guide called it a milestone. What was the number for, and to which
place did people measure the distance at that time?

My last question for the essay is about the surface of those roads. Some of them still exist
after two thousand years, while the street in front of my house has holes every spring. What did
the builders put under the stones to make them last so long?

My daughter has started to learn the violin, and her teacher says that she has to tune it each
time before she plays. We bought a small electronic tuner, but we do not understand the letters
that it shows. To which notes do the four strings belong?

We have tuned it now, and it sounded fine yesterday evening. This morning, however, all of the
strings were too low again, although nobody had touched the instrument during the night. The
window was open. Can the weather change the sound of a violin?

One of the strings broke while we were turning the peg, and she was quite frightened. I would
like to replace it myself, so that we need not wait for the shop to open on Monday. What do I
have to watch out for when I put on a new one?

We are planning a week in Lisbon in the early spring, and we would rather walk than sit in a
bus. People have told us that the city is built on hills and that the pavement gets slippery
when it rains. How much rain should we expect in March, and which shoes help?

Thank you, we have packed accordingly. On one of the days we would like to see the sea, and not
only the river. We have no car, and we would like to be back for dinner. Which place near the
city can be reached by train, and how long does it take?

In the evening we want to hear the sad songs that the city is famous for, but not in a place
that was made only for tourists. What is this music called, in which quarter should we look for
it, and is it rude to talk while somebody sings?

In my garden the leaves of the tomato plants turn yellow, beginning with the oldest ones near
the ground, while the tops of the plants look healthy and have many flowers. I water them every
evening from above with a hose. What could be missing, or is it an illness?

I have changed the watering, as you said, and the new leaves look better. There are now many
green fruits, but hardly any of them turns red, although it is already the end of August and the
nights get colder. Can I do anything to help them along?

The first frost has been announced for this weekend, and there are still three kilograms of
green tomatoes on the plants. My neighbour says that they ripen in a drawer, and my mother says
that they are poisonous. Which of the two is right, and what should I do?

My grandfather left me a box with old photographs from the time around nineteen hundred. Some of
them are on glass, and others on thick brown cardboard with a gold edge. I would like to keep
them for my children. How should I store them, and what must I avoid?

I have bought boxes without acid, as you recommended. On several of the pictures there are
people whom nobody in the family knows any more, but the name of a photographer and of a town is
printed below. How could I find out when these pictures were taken?

With your help I found the town and the decade. Now I would like to make copies for my cousins,
without taking the originals to a shop. I have an ordinary scanner and a camera. Which of the
two is gentler to an old photograph, and which settings should I use?

Our child asks why the sky is blue during the day and red in the evening, although it is the
same sun and the same air. We tried to explain it and noticed that we do not know it ourselves.
Can you explain it in such a way that a child of seven understands it?

That was a good explanation, and it led to the next question, of course. If the air makes the
blue light go in all directions, why are the clouds white and not blue, and why do they become
grey or nearly black before a thunderstorm?

Now the child wants to see it with its own eyes and make a small blue sky in the kitchen. We
have a glass jar, water, milk, and a torch. Can we build something out of these things that
shows the blue light from the side and the red light from the front?

I play chess against my uncle every Sunday, and I lose each time in the first twenty moves,
because he attacks my king while it is still standing in the middle. I know how all pieces move,
but nothing about openings. Which simple rules should I follow first?

I lasted for forty moves this time, which is a great success. In the end we both had only a king
and a few pawns, and he knew exactly what to do, while I moved here and there. What is the most
important idea when only kings and pawns are left?

Next Sunday is his birthday, and I would like to surprise him with a famous game, played through
from memory. It should be short and beautiful, with a sacrifice that he has not seen before. Can
you name one, with the players and the year, that fits this purpose?

The heating in our flat makes a gurgling noise, and one of the radiators is hot below and cold
above. The caretaker is on holiday, and it is the coldest week of the year. Is this something
that I can put right by myself, and which tool would I need for it?

The noise has stopped, and the radiator is warm all over. A little water came out as well and
made a dark stain on the wooden floor, about as large as a hand. It is already dry, but the
stain has stayed. How do I get it out without sanding the whole floor?

The stain is nearly gone, many thanks. The caretaker has come back and wants to know how high
the pressure in the system is now, because I have let air out of it. Where do I read this
number, and which range would be normal for a house with four floors?

For my language class I have to write a short poem about autumn, and it should have only three
lines, like the ones from Japan. I know that there is a rule about syllables, but I have heard
different numbers. What is the rule, and do people still keep to it today?

Here is my first attempt: the leaves are falling, my grandmother sweeps the path, again and
again. My teacher says that a word is missing that shows the season without naming it. Which
kinds of words were used for that, and which of them would suit my poem?

I have changed it, and I am content with it now. The last task is to say something about a
famous poet of this form, in two sentences and without reading from a sheet. Whom should I
choose, when did this person live, and what was his best known poem about?"""

_PARAGRAPHS = [" ".join(paragraph.split()) for paragraph in _QUESTIONS.split("\n\n")]

CHATS = tuple(
    (_PARAGRAPHS[at], _PARAGRAPHS[at + 1], _PARAGRAPHS[at + 2])
    for at in range(0, len(_PARAGRAPHS), 3)
)
"""Three consecutive questions per conversation."""
