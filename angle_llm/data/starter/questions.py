"""Questions: the positive asks the same in other words, the negative asks something else on the same topic.

"&" gives a block its own slot; otherwise the notation is that of `news`.
"""

QUESTIONS = """
= (How do I|How can I|What is the best way to) (remove|get rid of) {stain} from a {cloth}?
& stain: red wine, coffee, grease, ink, grass, blood, candle wax, tomato sauce, mustard, chewing gum
& cloth: cotton shirt, wool carpet, leather sofa, silk tie, pair of jeans, tablecloth, car seat, wedding dress
+ paraphrase: (Does anyone know how to|What will) get {stain} stains out of a {cloth}?
- other: How (often|warm) should I wash a {cloth}?
- object: How do I remove {stain!} from a {cloth!}?
= (How long does it take|How much time do I need) to (cook|prepare) {dish}?
& dish: brown rice, lentil soup, a whole chicken, beef stew, mushroom risotto, baked potatoes, roast lamb, pumpkin pie,
  black beans
+ paraphrase: (What is the usual cooking time for {dish}|After how many minutes will {dish} be ready to eat)?
- other: (What spices go well with|How many calories are there in|Can I freeze) {dish}?
- object: How long does it take to cook {dish!}?
= (How do I|How can I|What should I do to) (remove|clean off) rust (from|on) {metal}?
& metal: a garden tool, an old bicycle chain, a cast iron pan, a kitchen knife, a car door, a metal gate
+ paraphrase: (What takes rust off|Is there a trick for getting the rust off) {metal}?
- other: (Where can I sell|How much does it cost to replace|How do I sharpen or paint) {metal}?
- antonym: (How do I make|What makes) {metal} rust faster?
= (Can|Could) {food} (be dangerous for|be harmful to|poison) a {pet_one}?
& food: chocolate, grapes, raw onions, avocado, salted nuts, moldy bread
& pet_one: dog, cat, rabbit, guinea pig, parrot, hamster
+ paraphrase: Is it (dangerous|unsafe) for a {pet_one} to eat {food}?
- other: How (long|often) (does|should) a {pet_one} sleep during the day?
- object: Is it (dangerous|unsafe) for a {pet_one} to eat {food!}?
= (How do I|How can I) teach a {pet_one} to {trick}?
& pet_one: puppy, dog, parrot, kitten, horse
& trick: come when called, stay calm around strangers, stop biting, walk on a lead, sit on command, use a litter box
+ paraphrase: What is a good way to train a {pet_one} so that it learns to {trick}?
- other: (How much should I pay for|What should I feed|Which vaccines are needed for) a {pet_one}?
- object: How do I teach a {pet_one} to {trick!}?
= (What is|What's) the (cheapest|fastest|easiest) way to (get|travel) from {city} to {city2}?
+ paraphrase: I want to go from {city} to {city2}; which (route|means of transport) would you recommend?
- other: (What is the weather like|What can I see|Where should I stay) in {city2} in {month}?
- place: What is the (cheapest|fastest|easiest) way to get from {city!} to {city2}?
= (Do I need|Is it necessary to have) a visa (to visit|for a holiday in|for a short trip to) {country}?
+ paraphrase: Can I (enter|travel to) {country} without a visa?
- other: (How do I apply for citizenship of|How safe is it to drive in|What is the currency of) {country}?
- place: Do I need a visa to visit {country!}?
= (What should|What can) I (see|visit|do) (during|on) a (weekend|short stay|day trip) in {city}?
+ paraphrase: Which sights in {city} are worth (a visit|seeing) if (time is short|I only have a day or two)?
- other: (How expensive is it to rent a flat|Is it hard to find a job|Are the schools good) in {city}?
- place: What should I see during a weekend in {city!}?
= (When|What time of year) is (the best time|it best) to (visit|travel to) {country}?
+ paraphrase: In which (months|season) should (I|one) go to {country}?
- other: (Who governs|How large is the population of|Which languages are spoken in) {country}?
- antonym: When should I stay away from {country}?
= Why (does|would) my {machine} (make|produce) a {noise} noise?
& machine: washing machine, refrigerator, car engine, bicycle, printer, ceiling fan, vacuum cleaner, laptop, dishwasher
& noise: loud grinding, clicking, high-pitched whining, rattling, buzzing
+ paraphrase: What (causes|is behind) the {noise} (sound|noise) (that comes from|in) my {machine}?
- other: (How much electricity does a {machine} use|How long is the warranty on a {machine}|Which brand of {machine} is
  the best)?
- object: Why does my {machine!} make a {noise!} noise?
= (How do I|How can I) (fix|repair) a {broken} (myself|without calling a professional|)?
& broken: dripping faucet, cracked phone screen, squeaky door, torn curtain, running toilet, loose doorknob, leaking
  gutter,
  flat bicycle tire, wobbly chair, jammed zipper, clogged sink, scratched table
+ paraphrase: I have a {broken}; what can I do about it?
- other: Who is to blame for a {broken}, (the tenant|the owner) or somebody else?
- object: How do I fix a {broken!}?
= (How many {unit} are there|What number of {unit} is contained) in (a|one) {whole}?
& unit: calories > energy, grams of protein > protein, teaspoons of sugar > sugar, grams of fat > fat
& whole: banana, slice of pizza, boiled egg, glass of milk, cheeseburger, bowl of porridge, bar of chocolate, handful
  of almonds
+ paraphrase: How much {unit^} does a {whole} (have|contain)?
- other: (Why is|Since when is) a {whole} so (popular|expensive|hard to digest)?
- object: How many {unit!} are there in a {whole!}?
= (What is the difference|How can I tell the difference) between {twin} and {twin^}?
& twin: jam > jelly, a crocodile > an alligator, weather > climate, stocks > bonds, baking soda > baking powder, a
  virus > a bacterium,
  a violin > a viola, butter > margarine, a hare > a rabbit, a lake > a pond, fiction > nonfiction, a moth > a
  butterfly,
  a debit card > a credit card, espresso > filter coffee, a turtle > a tortoise
+ paraphrase: (In what way do|How do) {twin} and {twin^} differ?
- other: Why do so many people (talk|read) about {twin} and {twin^}?
- object: What is the difference between {twin!} and {twin!^}?
= (How do I|How can I) (fall asleep|get to sleep) (faster|more quickly) {when}?
& when: when I am stressed, after a night shift, in a hot room, on a plane, in a noisy hotel, before an exam, after
  drinking coffee, in a tent
+ paraphrase: I lie awake for hours {when}; what (helps|can I do)?
- antonym: How do I (stay awake|keep from falling asleep) {when}?
- object: How do I fall asleep {when!}?
= (How can I|What should I do to) (lose|get rid of) {few} pounds without (a strict diet|going hungry|giving up bread)?
& few: 5, 8, 10, 12, 15, 20, 25, 30
+ paraphrase: Is there a way to become {few} pounds lighter (and still eat normally|while eating normally)?
- antonym: How can I (gain|put on) {few} pounds (of muscle|) (quickly|in a healthy way)?
- other: How many kilograms are {few} pounds?
= (How do I|How can I) (learn to|start learning to) {skill} (at my age|on my own|as a beginner|without a teacher)?
& skill: play the piano, swim, speak Spanish, draw portraits, write code, dance, play chess, use sign language, sing,
  sew, juggle, surf
+ paraphrase: What is a good (plan|method) for (a beginner|someone) who wants to learn to {skill}?
- other: How many people in the world can {skill}?
- object: How do I learn to {skill!}?
= (How do I|How can I) (reset|change|recover) the password (for|of) {account}?
& account: my email account, my bank's website, a wireless router, my work laptop, an online shop, a game account, my
  phone
+ paraphrase: I (forgot|cannot remember) the password of {account}; how do I get (in again|access again)?
- other: How do I (delete|cancel|sell|pay for) {account}?
- object: How do I protect {account} (from hackers|against theft)?
= Why (is my {gadget} so slow|does my {gadget} run so slowly) (after the update|today|lately)?
& gadget: laptop, phone, tablet, smartwatch, e-reader, game console, desktop computer
+ paraphrase: What can I do about a {gadget} that has become (sluggish|very slow)?
- antonym: Why is my {gadget} so fast (after the update|today|lately)?
- other: (Where can I buy|How do I insure|How do I give away) a used {gadget}?
= (How do I|How can I) (transfer|move|copy) {files} from my {gadget} to (a new computer|an external drive|my other
  phone)?
& files: photos, contacts, music, text messages, bookmarks, large videos
& gadget: old phone, camera, tablet, broken laptop
+ paraphrase: What is the simplest way to get {files} off my {gadget}?
- antonym: How do I (delete|erase) all {files} on my {gadget} for good?
- other: Which {gadget} takes the best pictures (in the dark|under water)?
= (What does it mean|What does it tell me) (when|if) (a|my) {pet_one} {sign}?
& pet_one: cat, dog, rabbit, parrot, horse
& sign: keeps shaking its head, stops eating, hides all day, breathes very fast, scratches all the time, loses its hair
+ paraphrase: My {pet_one} {sign}; what could be the reason?
- other: What is a good name for a {pet_one}?
- object: What does it mean when a {pet_one!} {sign!}?
= (How often|How many times a {period}) (should I|do I have to|do I need to) water (a|my) {plant_one}?
& period: week, month
& plant_one: cactus, orchid, lemon tree, fern, tomato plant, bonsai, peace lily, rubber plant, rose bush
+ paraphrase: How much water does a {plant_one} need?
- other: Why are the leaves of my {plant_one} turning (yellow|brown)?
- object: How often should I water a {plant_one!}?
= (When|In which month) should I (plant|sow) {seed} in (a cool climate|my garden|a raised bed)?
& seed: carrots, garlic, tulip bulbs, sunflowers, lettuce, beans, onions, pumpkins, peas, spinach
+ paraphrase: What is the right time of year to put {seed} into the ground?
- other: How do I (cook|store|keep slugs away from) {seed}?
- antonym: When should I (harvest|pick|dig up) {seed}?
= (Should I|Is it a good idea to|Is it wise to) (pay off|repay) my {loan} early?
& loan: mortgage, student loan, car loan, credit card debt
+ paraphrase: Does it make sense to get rid of my {loan} ahead of time?
- antonym: How can I put off paying back my {loan}?
- other: Which bank offers the best {loan} (for young people|this year|to foreigners)?
= (How much|What amount of) money (should I|do I need to) (save|put aside) for {goal}?
& goal: retirement, a house, college, a long trip, a new car, a wedding, emergencies, a baby, a year without work, my
  funeral
+ paraphrase: How big should my savings for {goal} be?
- other: Is it wise to borrow money for {goal}?
- object: How much money should I save for {goal!}?
= (How do I|What is the right way to) ask my boss for {wish}?
& wish: a raise > to earn more, a day off > a free day, a promotion > a higher position, remote work > to work from
  home,
  a transfer > to move to another branch, a reference > a letter about my work, fewer hours > to work part-time, a new
  desk > better furniture
+ paraphrase: I would like {wish^}; how should I (bring it up|raise it) with my (manager|employer)?
- antonym: How do I tell my boss that I do not want {wish}?
- object: How do I ask my boss for {wish!}?
= What (should|can) I wear (to|for) {event}?
& event: a job interview, a funeral, a summer wedding, a winter hike, a black-tie dinner, a first date, a garden party
+ paraphrase: Which clothes are (suitable|appropriate) for {event}?
- other: (What should I bring to|How early should I arrive for|How long is) {event}?
- object: What should I wear to {event!}?
= (How can I|What should I do to) (improve|work on) my {ability} (before|for) (an exam|a job interview|a trip)?
& ability: English pronunciation, handwriting, memory, typing speed, public speaking, listening skills, spelling, essay
  writing
+ paraphrase: What are good exercises (if I want|in order) to (get better at|strengthen my) {ability}?
- other: (How is {ability} measured in schools|Why do schools test {ability} in children)?
- object: How can I improve my {ability!}?
= (Why is it that|What is the reason that|How come) {fact}?
& fact: the sky is blue > the blue color of the sky, sea water is salty > the salt in the sea, ice floats on water >
  ice floating on water,
  leaves change color in autumn > the autumn colors of leaves, cats purr > the purring of cats, people yawn > human
  yawning,
  thunder follows lightning > thunder after lightning, onions make you cry > the tears when chopping onions,
  flamingos are pink > the pink feathers of flamingos, bread rises in the oven > the rising of bread dough
+ paraphrase: (What explains|What is the cause of) {fact^}?
- object: What explains {fact!^}?
- other: Who was the first to (write a poem|paint a picture|make a film) about {fact^}?
= How (far|many miles) is (it|the distance) from {city} to {city2}?
+ paraphrase: What is the distance between {city} and {city2}?
- other: Which (city|place) has more inhabitants, {city} or {city2}?
- place: How far is it from {city!} to {city2}?
= (What is|Can you tell me) the (population|number of inhabitants) of {country}?
+ paraphrase: How many people live in {country}?
- other: (What is the capital|Who is the head of state|What is the national dish) of {country}?
- place: How many people live in {country!}?
= (Who invented|Who came up with|Who first made) {invention}?
& invention: the zipper, the steam engine, the pencil, the microscope, the bicycle, the sewing machine, paper money,
  eyeglasses,
  the elevator, the compass, the refrigerator, the parachute
+ paraphrase: (To whom do we owe|Which person is behind) the invention of {invention}?
- other: How does {invention} work?
- object: Who invented {invention!}?
= How does {system} work?
& system: a heat pump, a touch screen, the human ear, a nuclear reactor, a vaccine, the stock market, a jet engine, a
  lie detector,
  solar power, a hearing aid, noise cancellation, a lock on a canal
+ paraphrase: (Can somebody explain|Who can tell me) (how|in what way) {system} works?
- other: (When was|By whom was) {system} (first described|first seen or used)?
- object: How does {system!} work?
= Is it (safe|okay|all right) to {habit}?
& habit: drink tap water abroad, exercise with a cold, eat eggs past their date, run every day, swim after a big meal,
  sleep with a fan on,
  take two painkillers at once, reuse plastic bottles, refreeze thawed meat, look at a screen in the dark
+ paraphrase: (Are there any risks|Could it harm me) if I {habit}?
- other: (Why do so many people|How many people|Where do people) {habit}?
- object: Is it safe to {habit!}?
= (What are|Can you name) the (symptoms|first signs) of {illness}?
& illness: a heart attack, food poisoning, iron deficiency, a concussion, heatstroke, a broken rib, an ear infection,
  burnout, lactose intolerance
+ paraphrase: How (do I notice|can I tell) that (someone has|I have) {illness}?
- other: How (is {illness} treated|can doctors treat {illness} in an emergency)?
- object: What are the symptoms of {illness!}?
= (How do I|How can I) (treat|deal with|soothe) {ailment} at home?
& ailment: a sore throat, a mild burn, a bee sting, a blocked nose, a stiff neck, a sunburn, hiccups, a blister, a
  nosebleed, a toothache
+ paraphrase: What (home remedy|household remedy) (helps with|works for) {ailment}?
- other: What (leads to|is the cause of) {ailment}?
- object: How do I treat {ailment!} at home?
= Which {kind} (do you recommend|would you suggest|should I choose) for {user}?
& kind: laptop, bicycle, camera, phone, tent, mattress, pair of running shoes, coffee maker, guitar
& user: a beginner, a tall person, my grandmother, someone on a budget, a student, a left-handed teenager
+ paraphrase: I am looking for a {kind} for {user}; what would be a good (choice|pick)?
- other: How do I (sell|recycle|clean) an old {kind}?
- object: Which {kind!} do you recommend for {user!}?
= (How do I|How can I) (stop|keep) {pest} from (getting into|coming into|invading) {area}?
& pest: ants, mice, pigeons, mosquitoes, moths, raccoons, fruit flies, slugs, moles
& area: the kitchen, the attic, my garden, the garage, my tent, the basement
+ paraphrase: What (keeps|will keep) {pest} (out of|away from) {area}?
- antonym: How do I attract {pest} to {area}?
- object: How do I keep {pest!} out of {area!}?
= How (do|can) I keep {item} fresh (for longer|for several days|)?
& item: fresh basil, cut flowers, ripe bananas, homemade bread, ground coffee, mushrooms, strawberries, sliced cheese
+ paraphrase: What is the best place to keep {item} (in good condition|from going bad)?
- other: Where (can I buy|do I find) {item} (at a low price|at night)?
- object: How do I keep {item!} fresh?
= (Can I|Am I allowed to|Is it legal to) {act} in {country}?
& act: drive with a foreign license, fly a drone, work on a tourist visa, camp on a beach, collect shells, own a
  parrot, fish without a permit
+ paraphrase: (Does the law in {country} let me|According to the law of {country}, may I) {act}?
- other: How many tourists (visit|went to) {country} last year?
- object: Is it legal to {act!} in {country}?
= (What happens|What will happen) if I {mistake}?
& mistake: miss a tax deadline > missing a tax deadline, swallow chewing gum > swallowing chewing gum,
  mix bleach with vinegar > mixing bleach with vinegar, travel with an expired passport > using an expired passport,
  put diesel in a petrol car > filling a petrol car with diesel, lose a boarding pass > the loss of a boarding pass,
  overcharge a phone battery > overcharging a phone, return a library book late > late return of a library book,
  pay the rent late > being late with the rent, skip breakfast every day > never having breakfast
+ paraphrase: What are the consequences of {mistake^}?
- object: What happens if I {mistake!}?
- other: How many people in {country} {mistake}?
= (How do I|What do I need to) (make|prepare) {treat} (from scratch|at home|without an oven)?
& treat: vanilla ice cream, sourdough bread, egg pasta, apple jam, cheesecake, tomato ketchup, yogurt, pickles,
  pancakes, hummus
+ paraphrase: (Does anyone have|Can somebody give me) a (simple recipe|recipe) for homemade {treat}?
- other: What makes {treat} so (healthy|popular|fattening) (compared with fruit|for children)?
- object: How do I make {treat!} from scratch?
= Where can I (buy|find|get) {ware} (in|near) {city}?
& ware: secondhand books, fresh fish, vegan food, antique furniture, cheap phone chargers, winter boots, art supplies,
  used bicycles
+ paraphrase: Which (shops|places) in {city} sell {ware}?
- other: Where in {city} can I (donate|get rid of|sell) {ware}?
- object: Where can I buy {ware!} in {city}?
= (How old do you have to be|What is the minimum age) to {adult_act} in {country}?
& adult_act: vote, get married, buy alcohol, drive a car, rent a car, give blood, open a bank account, work in a bar
+ paraphrase: From what age (can people|are people allowed to) {adult_act} in {country}?
- other: How many people in {country} (do not want|were refused permission) to {adult_act}?
- place: What is the minimum age to {adult_act} in {country!}?
= (What time|When) does the {place_one} (open|start its day) on {day}?
& place_one: city library, swimming pool, post office, art museum, farmers' market, botanical garden, passport office
+ paraphrase: From what hour can I (get into|go to) the {place_one} on {day}?
- antonym: When does the {place_one} close on {day}?
- other: How do I get to the {place_one} by bus?
= (How do I|How should I) (start|begin) {text}?
& text: a cover letter, a wedding speech, a novel, a complaint letter, a blog, a letter to a judge, a research paper, a
  thank-you note
+ paraphrase: What is a good opening for {text}?
- antonym: How do I (end|finish|conclude) {text}?
- other: (How long should|How many pages should) {text} be?
"""
