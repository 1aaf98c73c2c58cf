"""Plain statements about oneself, one's plans, other people and how things are, in the notation of `forum`."""

EVERYDAY = """
= (I am|I'm) (looking for|trying to find) a {thing} that {does} and does not cost (too much|a fortune).
& thing: tent, stroller, backpack, office chair, lamp, headset, printer, heater, suitcase, keyboard
& does: is easy to carry, lasts for years, takes up little room, makes no noise, looks good, needs no batteries
+ paraphrase: Can anyone recommend an affordable {thing} that {does}?
+ drop: I am looking for a {thing}.
- antonym: I have a {thing} that {does}, and I want to (sell it|get rid of it).
- object: I need a {thing!} that is as expensive as possible.
= {actor} (forgot|did not remember) to {chore} (last night|this morning|before the trip).
& actor: my brother, my boss, our neighbor, her husband, his assistant, the babysitter, my flatmate
& chore: lock the door, feed the cat, pay the bill, switch off the oven, pick up the children, water the plants, send
  the letter
+ synonym: {actor} should have thought of it but did not {chore}.
+ hypernym: Something was forgotten.
- antonym: {actor} remembered to {chore}.
- negation: {actor} did not forget to {chore}.
= {actor} (learned|taught herself) to {skill} at the age of {age}.
& actor: my aunt, our neighbor, her grandmother, my cousin, the mayor's wife
& skill: drive, swim, read, ski, play chess, speak French, use a computer
& age: forty, fifty-five, sixty, seventy-two, eighty
+ synonym: {actor} was {age} years old when she found out how to {skill}.
+ hypernym: Somebody acquired a new skill late in life.
- antonym: {actor} forgot how to {skill} at the age of {age}.
- negation: {actor} never learned to {skill}.
= (The|Our) {place} is (only|just) {n} minutes (away|from here) (on foot|by bike).
& place: station, beach, school, supermarket, pharmacy, library, cinema, city center, swimming pool
+ synonym: You can get to the {place} in {n} minutes (under your own power|without a car).
+ hypernym: The {place} is close by.
- antonym: The {place} is (very far|hours) away and you need a car.
- number: It takes {n!} hours to walk to the {place}.
= The {item} (costs|is) {price} dollars, which is (more|far more) than I can (afford|pay).
& item: apartment, guitar, course, ticket, dress, repair, treatment, dining table, flight
& price: 80, 250, 400, 900, 1,500, 3,200
+ synonym: I do not have enough money for the {item}.
+ hypernym: The {item} is (expensive|too dear for me).
- antonym: The {item} is (cheap|a bargain), and I can easily (afford|pay for) it.
- negation: I do not have to pay for the {item}.
= {who} has been (ill|sick) (in bed|at home) with {illness} (since {day}|for {n} days).
& who: my daughter, our teacher, the goalkeeper, my colleague, the pilot, her father, the chef
& illness: the flu, a fever, a stomach bug, a bad cold, pneumonia, chickenpox
+ synonym: {who} has (caught|come down with) {illness}.
+ hypernym: {who} is not well.
- antonym: {who} has (recovered from|got over) {illness} and is (healthy|fit) again.
- negation: {who} has not been ill (this year|at all).
= The {thing} is (too|much too) {adj} for me, so I (sent it back|returned it).
& thing: coat, mattress, desk, wardrobe, lamp, suitcase, sofa, bicycle, chair
& adj: small > large, heavy > light, dark > bright, ugly > pretty, flimsy > sturdy
+ synonym: I did not keep the {thing} because it was not {adj^} enough.
+ hypernym: The {thing} did not suit me.
- antonym: The {thing} is {adj^} enough, so I decided to keep it.
- negation: The {thing} is not too {adj}.
= {who} (quit|left|gave up) (a|the) job as a {job} to (become|work as) a {job2}.
& who: my sister, a friend of mine, our neighbor, my old classmate, his wife
& job: banker, teacher, nurse, lawyer, pilot, baker, engineer, journalist, police officer, carpenter, programmer, farmer
+ synonym: Once a {job}, {who} changed careers and is now (employed as|going to be) a {job2}.
+ hypernym: {who} changed (jobs|professions).
- agent: {who} was a {job2} first and then became a {job}.
- negation: {who} has never worked as a {job} or a {job2}.
= I (prefer {fav} to|like {fav} better than) {fav^} (by far|when I am on holiday|these days).
& fav: tea > coffee, coffee > hot chocolate, trains > planes, the mountains > the sea, the sea > the mountains,
  novels > films, cats > dogs, dogs > cats, summer > winter, winter > summer, small towns > big cities, rice > potatoes,
  board games > video games, jazz > pop music, sunrise > sunset, phone calls > text messages
+ synonym: Given the choice between {fav} and {fav^}, I would go for {fav}.
- antonym: I prefer {fav^} to {fav}.
- negation: I care for neither {fav} nor {fav^}.
= (We|They) (painted|repainted) the {room} {color} (last weekend|in {month}) and (love|are pleased with) the result.
& room: kitchen, bedroom, hallway, bathroom, garage, nursery, front door, garden shed
+ passive: The {room} was given a coat of {color} paint.
+ hypernym: The {room} has a new color.
- attribute: (We|They) painted the {room} {color!}.
- negation: The {room} has not been painted (for years|since it was built).
= (I would|I'd) (rather|sooner) {do} than {do2} (on a rainy day|after work|on a Sunday).
& do: read a book, go for a swim, stay in bed, cook a big meal, visit a museum, clean the windows, watch a match, call
  my parents
+ synonym: It would be more fun for me to {do} than to {do2}.
- antonym: I would rather {do2} than {do}.
- negation: I would enjoy neither: I do not want to {do} or {do2}.
= The {line} (leaves|departs) every {min} minutes (during the day|on weekdays) and takes {min2} minutes to the
  {stop}.
& min: 5, 8, 10, 15, 20, 30, 40
& line: bus, tram, train, shuttle, ferry
& stop: airport, old town, harbor, university, stadium, zoo
+ synonym: There is a departure every {min} minutes, and the ride to the {stop} lasts {min2} minutes.
+ drop: You can get to the {stop} by public transport.
- number: There is only one {line} a day to the {stop}.
- negation: There is no public transport to the {stop}.
= {who} (lent|gave) me {lent} (for the weekend|when mine broke), (and I am grateful|which was kind).
& who: my neighbor, a colleague, my uncle, the landlord, a stranger, my sister
& lent: a ladder, a bicycle, a tent, a suitcase, a drill, an umbrella, a lawn mower, a phone charger
+ synonym: I was allowed to use {lent} that (belonged to someone else|was not mine), thanks to {who}.
+ hypernym: Somebody helped me.
- antonym: {who} refused to lend me {lent}.
- agent: I lent {lent} to somebody, not the other way around.
= (Let the {stuff}|Allow the {stuff} to) (dry|harden|rest) for {n} hours before you {next}.
& stuff: paint > paint, glue > adhesive, plaster > wall, varnish > coating, clay > piece, cement > floor
& next: touch it, sand it, go on, move anything, add a second layer
+ paraphrase: Wait {n} hours until the {stuff} is ready; then {next}.
+ drop: The {stuff} needs time.
- antonym: {next} at once, while the {stuff} is still wet.
- number: Let the {stuff} dry for {n!} hours before you {next}.
= Click on the {icon} in the (upper|top) (left|right) corner and (choose|select) "{menu}" from the (list|menu).
& icon: gear icon, three dots, small arrow, envelope, magnifying glass, star, house symbol
& menu: Settings, Print, Share, Export, Language, Log out, Help, Save as
+ paraphrase: You will find "{menu}" in the menu that opens when you press the {icon}.
+ drop: There is a menu behind the {icon}.
- place: Ignore the {icon}; "{menu}" is at the bottom of the page.
- negation: There is no "{menu}" in this menu.
= You do not have to {duty} if you are {state}.
& duty: pay the fee, take the test, wear a uniform, attend the course, fill in the form, bring a certificate
& state: a student, over seventy, pregnant, a local resident, ill, a member, unemployed
+ paraphrase: Anyone who is {state} is free not to {duty}.
+ hypernym: There are exceptions to a rule.
- antonym: Even if you are {state}, you must {duty}.
- negation: There are no exceptions: everyone has to {duty}.
= It (rained|snowed) (all day|the whole week) in {city}, so we {stay} (instead of going out|).
& stay: stayed in the hotel > stayed, visited three museums > visited, played cards indoors > played, went to the
  cinema > went
+ synonym: Because of bad weather in {city}, we {stay}.
+ drop: The weather was bad in {city}.
- antonym: The sun shone all the time in {city}, and we spent every day outdoors.
- place: The weather was fine in {city}; it only rained in {city!}.
= {who} (has|keeps) a {pet} (called|named) {name}.
& who: the boy next door, my niece, our teacher, the old baker, her roommate
& pet: snake, rat, goldfish, donkey, parrot, tarantula, pony, goat
& name: Biscuit, Pepper, Lucky, Captain, Mango, Button
+ synonym: {name} is a {pet} and belongs to {who}.
+ hypernym: {who} owns an animal.
- object: {who} has a {pet!} (called|named) {name}.
- negation: {who} has no pets.
= (The shop|The clinic|The museum|The office) is open from {hour} to {hour2} (except on {day}|on weekdays).
& hour: eight > early, nine > morning, ten > late
& hour2: four > afternoon, five > afternoon, six > evening, seven > evening
+ synonym: You can go there between {hour} and {hour2}.
+ hypernym: The opening hours are limited.
- antonym: It is closed between {hour} and {hour2}.
- number: It is open around the clock.
= I (cannot|can't) (come|make it) to (your|the) {event} (on {day}|tonight|next week) because I (have to|must) {duty}.
& event: party, wedding, meeting, dinner, concert, barbecue, rehearsal
& duty: work late, look after my son, study for a test, catch a train, see the dentist, finish a report
+ synonym: Since I need to {duty}, you will have to do without me at the {event}.
+ drop: I will not be at the {event}.
- antonym: I will be at the {event}, because I do not have to {duty} after all.
- agent: You cannot come to my {event}, although you have nothing else to do.
"""
