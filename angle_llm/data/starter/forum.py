"""Advice, instructions and the plain talk of forums, in the notation of `questions`."""

FORUM = """
= (Preheat|Heat) the oven to {deg} degrees before you (mix|prepare) the {mix}.
& deg: 170, 180, 190, 200, 210, 220
& mix: dough, cake batter, filling, vegetables, bread, cookie dough
+ paraphrase: Before (working on|making) the {mix}, (turn the oven on|set the oven) to {deg} degrees.
+ drop: (Heat|Warm up) the oven first.
- order: Only turn the oven on after you have (mixed|prepared) the {mix}.
- negation: (Do not|You should not) heat the oven (in advance|before you prepare the {mix}).
= (Always|You should always|Make sure to) (unplug|disconnect) the {appliance} before {job} it.
& job: cleaning > clean, opening > open, repairing > repair, moving > move
& appliance: toaster, blender, vacuum cleaner, computer, lamp, sewing machine, coffee maker, printer
+ paraphrase: Pull the plug of the {appliance} first; (only then can you|afterward you can) work on it.
+ hypernym: (Be careful|Take precautions) when you work on electrical devices.
- antonym: (Leave the {appliance} plugged in|Keep the {appliance} switched on) while you {job^} it.
- negation: There is no need to unplug the {appliance} before {job} it.
= (Add|Stir in) {amount} of {ingredient} and (simmer|cook) (the sauce|the soup|the stew) for {n_min} minutes.
& amount: a pinch, two spoons, half a cup, a handful
& ingredient: sugar, chopped parsley, cream, grated cheese, lemon juice, tomato paste, red lentils, flour
& n_min: 5, 10, 15, 20, 30, 45
+ paraphrase: Put {amount} of {ingredient} in and leave it on the stove for another {n_min} minutes.
+ drop: You have to add {ingredient}.
- negation: Do not add any {ingredient} to the pot.
- antonym: Take the pot off the stove at once and (leave out|do without) the {ingredient}.
= (Turn|Take a) (left) at the {landmark} and (walk|continue|go) straight on for {n} (blocks|minutes).
& landmark: church, gas station, post office, fountain, school, town hall, bakery, second traffic light, railway bridge
+ paraphrase: (When you reach|At) the {landmark}, go left, then keep going for {n} more.
+ drop: You have to turn at the {landmark}.
- antonym: Turn right at the {landmark} and (walk|go) straight on for {n} blocks.
- place: Do not turn before you have reached the {landmark!}; walk past the {landmark}.
= (Take|You should take) {dose} of this (medicine|drug|syrup) (before|after) (breakfast|every meal|going to bed).
& dose: one tablet, two tablets, ten drops, one spoonful, half a pill
+ synonym: The (recommended dose|right amount) of this (medication|remedy) is {dose} at a time.
+ hypernym: This (medication|remedy) must be (taken|swallowed).
- number: Never take as much as {dose}; (half of that|less) is enough.
- negation: Do not take this (medicine|syrup) (any longer|any more).
= (I think you should|You should|I would advise you to) (talk to|see|ask) a {expert} (before you decide|about it|as
  soon as possible).
& expert: lawyer, doctor, tax adviser, mechanic, vet, real estate agent, therapist, dentist, plumber, career counselor
+ paraphrase: (In my opinion|If I were you), the best thing to do is to (get advice from|consult) a {expert}.
+ hypernym: You should get professional help.
- antonym: (Talking to|Seeing) a {expert} would be a waste of (time|money).
- negation: You do not need a {expert} for (this|that).
= (It depends on|That depends on) {factor}, so (there is no single answer|I cannot say for sure).
& factor: how much you are willing to spend, what you want to use it for, where you live, your level of experience, the
  size of your room,
  how long you plan to stay, the age of the child, the law in your country, how much time you have, the kind of soil
  you have
+ paraphrase: The answer (varies|differs) according to {factor}.
+ drop: (There is no simple answer|It is hard to give one answer).
- antonym: The answer is (always|exactly) the same, (whatever|no matter) the circumstances.
- negation: It has nothing to do with {factor}.
= (Both of them|Either of them|Either of the two) will do; (it does not matter|it makes no difference) which {option}
  you (choose|use|take).
& option: brand, route, color, file format, train, recipe, method, dictionary, plug, glue
+ paraphrase: You can pick the {option} you like better, since they are equally good.
- antonym: You must choose the {option} with great care, because only one of them (works|is right).
- negation: Neither {option} will do.
= I (bought|got) a used {buy} (last week|a month ago|in {month}) and it (broke down|stopped working) after {n} days.
& buy: laptop, motorcycle, washing machine, camera, phone, lawn mower, van, piano keyboard, freezer, drill
+ synonym: The secondhand {buy} I purchased did not (last|hold out) long.
+ hypernym: Something I bought is (broken|not working).
- antonym: The used {buy} I bought (still works perfectly|has never let me down).
- negation: I did not buy a used {buy}; I (rented|borrowed) one and it was fine.
= My {relative} (has been|has long been) (afraid|scared|terrified) of {fear} (since childhood|and avoids them|).
& relative: sister, brother, mother, uncle, daughter, cousin, roommate, husband, grandmother
& fear: spiders, dogs, heights, thunderstorms, dentists, elevators, snakes, crowds
+ synonym: {fear} (frighten|scare) my {relative}.
+ hypernym: Somebody in my life has a fear.
- antonym: My {relative} (loves|is fond of|really enjoys) {fear}.
- agent: My {relative!} is afraid of {fear}, but my {relative} is not.
= I have (played|been playing|practiced) the {music} for {years} and (still love it|enjoy it every day).
& music: violin, clarinet, flute, guitar, accordion, cello, trumpet, harp
+ synonym: For {years} now, playing the {music} has given me (pleasure|joy).
+ hypernym: I play a musical instrument.
- antonym: I (gave up|quit) the {music} after one (week|lesson) because I hated it.
- negation: I have never (held|touched|played) a {music} in my life.
= The (easiest|best) (way|solution) is to (restart|reboot) (the|your) {tech} and (check|see) whether the
  (problem|error) (is gone|remains).
& tech: router, computer, phone, printer, server, television
+ paraphrase: Switch the {tech} off and on again; (that may solve it|then look if it works).
+ hypernym: There is a simple thing to try with your {tech}.
- antonym: Whatever you do, do not (switch off|restart) your {tech}.
- other: You will need to buy a new {tech}.
= (Back up|Make a copy of) your {files} (before|prior to) (installing|running) the (update|new version).
& files: photos, documents, emails, database, settings, contacts
+ paraphrase: Save your {files} somewhere (first|else), and only then (update|install).
+ hypernym: Protect your data from loss.
- antonym: Delete your {files} before installing the update.
- negation: You can install the update without (saving|backing up) your {files}.
= (Store|Keep) the {food} in (a cool, dry place|the refrigerator|an airtight container) for no more than {n} days.
& food: cheese, leftover soup, fresh bread, cooked rice, smoked fish, fruit salad, cream cake, sliced ham
+ synonym: The {food} (spoils|will go bad) if you keep it (too warm|too long|badly).
+ hypernym: The {food} must be stored properly.
- antonym: (Leave|Keep) the {food} in a (warm|hot) place in the sun.
- negation: It does not matter (where|how long) you keep the {food}.
= (Wear|Put on) (gloves|goggles|a mask) when you (work with|handle|use) {hazard}.
& hazard: bleach, paint thinner, a chainsaw, broken glass, fiberglass, strong acid, a grinder, pesticides, wood stain
+ synonym: (Protect yourself|Use protective gear) (while working with|if you handle) {hazard}.
+ hypernym: Safety (comes first|is important).
- negation: You do not need any protection when you (work with|handle) {hazard}.
- antonym: Take off your (gloves|goggles|mask) before you touch {hazard}.
= The (hotel|hostel|guesthouse) in {city} was (clean|quiet|comfortable), and the staff (were very friendly|spoke good
  English|helped us a lot).
+ synonym: We had a pleasant stay in {city}; the people who worked there were (nice|kind|helpful).
+ hypernym: I was (happy|satisfied) with our accommodation.
- antonym: The (hotel|hostel) in {city} was (dirty|noisy|uncomfortable), and the staff (were rude|ignored us).
- place: We never found a (decent|clean) (hotel|room) in {city}, only in {city!}.
= The {show} was (far too long|boring|a disappointment), and (the ending made no sense|I fell asleep halfway through).
& show: film, play, concert, lecture, documentary, musical, opera, TV series, magic show, ballet
+ synonym: I did not (like|enjoy) the {show} (at all|one bit).
+ hypernym: I have (a negative|no good) opinion of the {show}.
- antonym: The {show} was (gripping|thrilling|wonderful) from (start to finish|the first minute to the last).
- object: The {show!} bored me, but I loved the {show}.
= (Cut|Saw) the {material} to (size|length) with a sharp (blade|saw) and (smooth|sand) the edges.
& material: board, pipe, plywood, plastic sheet, wooden beam, cork panel
+ synonym: First trim the {material} to the right dimensions, then make its (edges|sides) smooth.
+ drop: The {material} has to be cut.
- antonym: Glue the {material} together (without cutting it|and leave the edges rough).
- negation: Never cut the {material}; (leave|use) it as it is.
= (Water|Spray) the {sprout} (every morning|twice a week|when the soil is dry) and (keep|place) (it|the pot) (in full
  sun|near a window).
& sprout: basil, orchid, cactus, lavender, mint, lemon tree, chili plant, ivy
+ synonym: The {sprout} needs (light|a bright spot) and (regular water|some watering).
+ hypernym: You have to (care for|look after) the plant.
- antonym: Keep the {sprout} in a dark (corner|room) and (never water it|let it dry out).
- object: The {sprout!} needs water and light, but the {sprout} should be thrown away.
= I (usually|normally|always) {habit} (before|after) (work|breakfast|dinner) because it (clears my head|keeps me
  healthy|helps me relax).
& habit: go for a run, meditate, take a cold shower, read the news, do crosswords, walk the dog, drink green tea, write
  a diary, do yoga
+ synonym: It is part of my (routine|day) to {habit}, and it does me good.
+ drop: I {habit}.
- negation: I never {habit}.
- antonym: I no longer {habit}, because it (made me tired|was bad for me).
= (Many|Most|A lot of) people {club} (agree|think|believe) that {claim}.
& club: in my office, in my running club, in my village, at my university, in my family, in my choir, in my neighborhood
& claim: meetings are too long, the rent is too high, cats are better than dogs, the bus is always late, the new
  manager is doing well,
  the park needs more benches, winter is the best season, breakfast matters most, phones should be banned at dinner
+ synonym: It is a (common|widespread) view {club} that {claim}.
+ drop: Some people (think|believe) that {claim}.
- antonym: (Hardly anybody|Almost no one) {club} (agrees|believes) that {claim}.
- object: What people {club} believe is that {claim!}, not that {claim}.
= You (cannot|are not able to) {task} (without|unless you have) {need}.
& task: enter the building > getting into the building, rent a car > renting a car, open an account > opening an
  account,
  apply for the job > the application, cross the border > crossing the border, join the club > joining the club,
  take the exam > sitting the exam, vote in the election > voting
& need: a valid passport, a photo ID, a credit card, written permission, proof of address, an invitation, a signed form
+ paraphrase: {need} (is|will be) (required|needed) to {task}.
+ synonym: For {task^} you must have {need}.
- negation: You can {task} (without|even if you do not have) {need}.
- antonym: Nobody will ask for {need} when you {task}.
= {date_of} has been (moved|postponed|put off) from {day} to {day2} because
  {reason}.
& reason: the speaker is ill, the room is flooded, too few people signed up, the heating broke down
+ synonym: (It will|That will) be on {day2}, not on {day}, because {reason}.
+ drop: Something planned for {day} will (take place later|happen on another day).
- negation: {date_of} will take place on {day} as planned.
& date_of: the meeting, the party, the lesson, the concert, the exam, the interview, the excursion
- antonym: {date_of} has been canceled and will not be held on {day2} either.
= I (cannot|can't) decide whether to (study|major in) {subject} or {subject2}.
& subject: biology, law, history, engineering, music, nursing, economics, philosophy, computer science, French,
  architecture
+ synonym: {subject} and {subject2} both appeal to me, and I have not made up my mind.
+ hypernym: I am (unsure|undecided) about my (studies|future).
- antonym: I am (absolutely sure|certain) that I want to study {subject}, not {subject2}.
- negation: I have no interest in {subject} or {subject2}.
= (There is|I see) nothing wrong with {thing} (as long as|if) (you enjoy it|nobody gets hurt|you can afford it).
& thing: eating meat, buying used clothes, living with your parents, changing jobs often, watching cartoons as an
  adult, asking for help,
  traveling alone, working from home, taking a nap at noon, skipping dessert
+ paraphrase: In my (view|opinion), {thing} is (fine|okay|acceptable).
- antonym: In my opinion, {thing} is (wrong|terrible|a big mistake).
- object: {thing!} is fine, but {thing} is not.
= You (would|will) save (some|a lot of) money if you {thrift} (from now on|more often|).
& thrift: cook at home > eat out, take the bus > drive, mend your clothes > buy new ones, grow vegetables > buy them,
  borrow books > buy them, cut your own hair > go to a barber, share a flat > live alone, make your own coffee > go to
  a cafe
+ paraphrase: It is cheaper to {thrift} than to {thrift^}.
- antonym: It is cheaper to {thrift^} than to {thrift}.
- negation: You will not save any money if you {thrift}.
= (Hold|Press) (down) the {button} for {n} seconds until the (light|display) (flashes|turns {color}).
& button: power button, reset key, volume key, red switch, start button, lever
+ synonym: Keep the {button} pressed for {n} seconds; then (you will see a change|something will light up).
+ hypernym: You have to operate the {button}.
- antonym: Release the {button} (at once|immediately), before the (light|display) comes on.
- number: Press the {button} for no more than (one second|half a second).
= (Fold|Bend) the {folded} in (half|the middle), then (open|unfold) it and (cut|trim) along the (line|crease).
+ synonym: First make a fold, then use scissors on the (line|fold) it leaves.
+ drop: The {folded} must be folded.
- antonym: Keep the {folded} flat and do not fold it at any point.
- order: Cut the {folded} before you fold it.
& folded: paper, sheet, card, leaflet, napkin, felt, cardboard, wrapping paper, fabric, foil
= Our {animal_one} (disappeared|ran away|got lost) {n} days ago, and (we have searched everywhere|the children are very
  sad|nobody has seen it since).
& animal_one: cat, dog, parrot, tortoise, rabbit, ferret, hamster
+ synonym: We have been missing our {animal_one} for {n} days.
+ hypernym: We have lost a pet.
- antonym: Our {animal_one} (came home|was found) {n} days ago, (safe and sound|in good health).
- negation: Our {animal_one} has never (run away|got lost).
= (The {fabric} shrank|My {fabric} lost its color) because I (washed it at ninety degrees|put it in the dryer|used the
  wrong setting).
& fabric: wool sweater, silk blouse, cotton dress, linen jacket, cashmere scarf
+ synonym: I ruined my {fabric} (in the laundry|by washing it the wrong way).
+ hypernym: A piece of clothing was damaged.
- antonym: The {fabric} came out of the wash (perfect|as good as new).
- object: The {fabric!} shrank in the wash, but the {fabric} is fine.
= We (moved|relocated) from {city} to {city2} {years} ago (because of|for) (work|the schools|the climate|my wife's job).
+ synonym: {years} ago we left {city} and (settled|started a new life) in {city2}.
+ drop: We no longer live in {city}.
- place: We moved from {city2} to {city} {years} ago.
- negation: We have never (lived in|moved away from) {city}.
= I (passed|got through) my {exam} (at the first attempt|with good marks|although I had hardly studied).
& exam: driving test, final exam, math test, language exam, pilot test, entrance exam, chemistry exam
+ synonym: I was successful in my {exam}.
+ hypernym: I took a test.
- antonym: I failed my {exam} (for the second time|by one point).
- negation: I have not (taken|finished) my {exam} yet.
= (Remove|Take out) the {n} screws (at the back|on the bottom) and (lift|take) off the (cover|lid|panel) (carefully|).
+ synonym: Unscrew the (cover|panel), which is held by {n} screws, and (take it away|set it aside).
+ hypernym: Open the device.
- antonym: Put the (cover|lid|panel) back on and tighten all {n} screws.
- negation: Leave the {n} screws where they are.
= The (train|bus|flight) from {city} was {n} hours late, so (I missed|we missed) (the wedding|the connection|an
  important meeting).
+ synonym: Because of a long delay on the way from {city}, (someone|a passenger) did not get there in time.
+ drop: The (journey|trip) from {city} took longer than planned.
- antonym: The (train|bus|flight) from {city} (arrived early|was right on time).
- place: The delay was on the way from {city!}; from {city} everything ran on time.
= (Nobody|No one) in my (family|class|team) (likes|eats|can stand) {dislike} (except me|but me).
& dislike: olives, anchovies, lentils, oysters, pickled onions, mushrooms, raisins, beets
+ paraphrase: I am the only one of us who likes {dislike}.
- antonym: Everybody in my (family|class|team) loves {dislike} (except me|, and so do I).
- object: Nobody in my family likes {dislike!}, but {dislike} are their favorite.
= (If you feel|When you feel) {feeling}, (sit down|stop), (breathe deeply|take a deep breath) and (drink some
  water|call somebody).
& feeling: dizzy, anxious, faint, overwhelmed, sick
+ paraphrase: (Pause for a moment|Take a break) when you (start to feel|are) {feeling}.
+ hypernym: There are things you can do against feeling {feeling}.
- antonym: When you feel {feeling}, (keep running|go on working) as hard as you can.
- negation: There is nothing you can do when you feel {feeling}.
= I (have to|must) get up at {hour} every (morning|day) because my (shift|school|first class) (starts|begins) early.
& hour: five, half past five, six, a quarter past six, half past six
+ synonym: My day (begins|starts) at {hour}, for I have to be (somewhere|there) early.
+ drop: I get up early.
- antonym: I (can sleep|sleep) until noon because my (shift|first class) starts late.
- number: I do not get up before (nine|ten) in the morning.
"""
