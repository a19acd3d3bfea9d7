"""Words of which generated texts are made: names of things that are hidden, and those of the sentences around."""

from __future__ import annotations

KEY_FIRST = (
    "amber silver golden scarlet ivory crimson azure copper jade violet cobalt coral indigo bronze ebony pearl ruby "
    "sapphire emerald topaz onyx opal quartz marble velvet linen cedar maple willow birch hazel lilac saffron ginger "
    "lunar solar arctic royal crystal iron"
).split()
KEY_SECOND = (
    "falcon otter badger heron lynx raven tiger dolphin sparrow beaver panther walrus gecko lizard cobra eagle turtle "
    "rabbit donkey camel jackal moose bison gibbon lemur weasel ferret puffin pelican stork magpie salmon lobster "
    "cricket hornet spider beetle mantis condor jaguar"
).split()
# Filler. Nouns also appear in the plural.
NOUNS = (
    "farmer baker sailor teacher doctor painter singer driver miller hunter gardener student soldier merchant "
    "neighbour traveller poet clerk captain child worker dancer guard writer table chair window door basket bottle "
    "lamp candle blanket ladder hammer bucket mirror carpet clock kettle spoon plate pillow curtain wagon boat bridge "
    "tower wall gate fence garden field river lake hill mountain valley forest meadow tree flower stone cloud storm "
    "shadow road path street market village town castle church school station harbour island beach letter book story "
    "song picture map coin ring coat hat shoe apple pear onion carrot potato cake cheese dog cat horse cow sheepdog "
    "goat hen duck pigeon engine wheel bell drum violin"
).split()
PLURALS = [
    noun + "es" if noun.endswith(("ch", "o")) else noun[:-1] + "ies" if noun.endswith(("ry", "dy")) else noun + "s"
    for noun in NOUNS
]
PLACES = "kitchen cellar attic hall courtyard barn stable library workshop orchard square corner yard mill inn".split()
ADJECTIVES = (
    "old young small large tall short quiet loud happy sad tired clever gentle proud strange empty full heavy light "
    "dark bright cold warm dry wet clean dusty broken wooden narrow wide deep round sharp soft rough smooth green red "
    "blue white black grey brown yellow distant famous lonely simple curious careful lazy brave honest polite hungry "
    "rich poor"
).split()
ADVERBS = (
    "slowly quickly quietly loudly often never always again together alone early late gladly sadly carefully suddenly "
    "silently gently today yesterday"
).split()
INTRANSITIVE = (
    "waited slept laughed cried danced sang walked returned vanished stopped rested worked arrived fell turned stood "
    "listened smiled trembled wandered"
).split()
TRANSITIVE = (
    "found carried painted moved watched followed bought sold lost cleaned repaired opened closed pushed pulled "
    "lifted dropped touched admired liked hated forgot remembered described noticed visited crossed left reached "
    "covered filled counted washed burned hid broke kept stole borrowed wanted"
).split()
PREPOSITIONS = (
    "near behind under above beside across around toward beyond past without with from inside outside"
).split()
PRONOUNS = "they he she we".split()
CONJUNCTIONS = "and but while because so when before after".split()
TIMES = "morning evening spring summer autumn winter afternoon night".split()
